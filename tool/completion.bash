# SPDX-License-Identifier: Apache-2.0
#
# Completion for bash: sub-commands, options and operations, as the command itself lists them, and the ids of running jobs.

_tutti_commands() { "${COMP_WORDS[0]}" help 2>/dev/null | sed -n 's/^  \([a-z]\{2,\}\)  .*/\1/p'; }
_tutti_options() { "${COMP_WORDS[0]}" help "$1" 2>/dev/null | grep -oE -- '(^|[ ,])--?[A-Za-z][a-z_-]*' | tr -d ' ,' | sort -u; }
_tutti_jobs() { "${COMP_WORDS[0]}" ps --json 2>/dev/null | sed -n 's/.*"job": *"\([^"]*\)".*/\1/p' | sort -u; }

_tutti() {
    local current=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]:-} words=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="$(_tutti_commands) --version --help"
    elif [[ $current == -* ]]; then
        words=$(_tutti_options "$command")
    else
        case $command in
        help) words=$(_tutti_commands) ;;
        bench) words=$("${COMP_WORDS[0]}" bench --list 2>/dev/null) ;;
        ps) words=$(_tutti_jobs) ;;
        trace) words=$(_tutti_jobs) && compopt -o default ;;
        *) compopt -o default ;;
        esac
    fi
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}
complete -F _tutti tutti
