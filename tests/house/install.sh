#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs into a temporary prefix and builds an outside program there: with pkg-config and with find_package, in C and in C++11, with the shared
# and the static libraries. Then looks at what the libraries export, and at the rest of what is installed.
set -u
[ -z "${TEST_SANITIZE:-}" ] || { echo "skipped: a sanitizer build is not for installing"; exit 77; }
passed=0 failed=0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
prefix=$folder/prefix
outside=$TEST_SOURCE/tests/house/outside

report() { # a sentence; the status and the output of what should prove it
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok      $1"
    else
        failed=$((failed + 1))
        printf 'FAILED  %s\n%s\n' "$1" "$3"
    fi
}
proves() { # a sentence, then a command that must succeed
    local sentence=$1 output status
    shift
    output=$("$@" 2>&1)
    status=$?
    report "$sentence" $status "$output"
}
says() { # a sentence, what must be printed, then a command
    local sentence=$1 wanted=$2 output status
    shift 2
    output=$("$@" 2>&1)
    status=$?
    [ "$output" = "$wanted" ] || status=1
    report "$sentence" $status "$output"
}

installs_no_tests() { # whatever builds what is installed names no source of a test, bench or example
    ! ninja -C "$TEST_BUILD" -t commands tutti_installed | grep -E -- "-c $TEST_SOURCE/(tests|bench|examples)/"
}
[ ! -f "$TEST_BUILD/build.ninja" ] || proves "what is installed is built without tests, benches and examples" installs_no_tests

proves "it installs into a prefix given late" cmake --install "$TEST_BUILD" --prefix "$prefix"
cp "$TEST_BUILD/install_manifest.txt" "$folder/manifest"
libraries=$(dirname "$(find "$prefix" -name libtutti.a)")
export PKG_CONFIG_PATH=$libraries/pkgconfig LD_LIBRARY_PATH=$libraries
cp "$outside/program.c" "$folder/program.cc"
has_tensor=0
[ -f "$libraries/libtutti-tensor.a" ] && has_tensor=1

if command -v pkg-config >/dev/null; then
    strict="-Wall -Wextra -Wpedantic -Werror"
    shared=$(pkg-config --cflags --libs tutti)
    # Where only archives are, what pkg-config names for a static link is all that it takes.
    archives=$folder/archives
    mkdir "$archives" && cp -r "$libraries"/*.a "$libraries/pkgconfig" "$archives" && sed -i "s,^includedir=.*,includedir=$prefix/include,;s,^libdir=.*,libdir=$archives," "$archives"/pkgconfig/*.pc
    static=$(PKG_CONFIG_PATH=$archives/pkgconfig pkg-config --static --cflags --libs tutti)
    static_tensor=$(PKG_CONFIG_PATH=$archives/pkgconfig pkg-config --static --cflags --libs tutti-tensor 2>/dev/null)
    # shellcheck disable=SC2086
    {
        proves "pkg-config: C, shared" cc -std=c17 $strict "$outside/program.c" -o "$folder/c" $shared
        proves "pkg-config: C++11, shared" c++ -std=c++11 $strict "$folder/program.cc" -o "$folder/cxx" $shared
        proves "pkg-config: C++20, options on the spot" c++ -std=c++20 $strict -Wno-missing-field-initializers "$folder/program.cc" -o "$folder/cxx20" $shared
        proves "pkg-config: C, static" cc -std=c17 $strict "$outside/program.c" -o "$folder/c_static" $static
        proves "pkg-config: C++11, static" c++ -std=c++11 $strict "$folder/program.cc" -o "$folder/cxx_static" $static
        [ $has_tensor = 0 ] || {
            proves "pkg-config: tutti-tensor" cc -std=c17 $strict "$outside/tensor.c" -o "$folder/tensor" $(pkg-config --cflags --libs tutti-tensor)
            proves "pkg-config: tutti-tensor, static" cc -std=c17 $strict "$outside/tensor.c" -o "$folder/tensor_static" $static_tensor
        }
        # Where hwloc is used and its libraries have no archives nobody can link a wholly static program.
        if [[ $static != *-lhwloc* ]] || echo 'int hwloc_topology_init(void *); int main(void) { return hwloc_topology_init(0); }' |
            cc -static -x c - -o "$folder/probe" $(pkg-config --static --libs hwloc) 2>/dev/null; then
            proves "pkg-config: wholly static" cc -static "$outside/program.c" -o "$folder/whole" $static
            says "pkg-config: the wholly static program runs" "sum 3" "$folder/whole"
        fi
        for example in "$prefix"/share/doc/tutti/examples/*.c; do
            package=tutti
            case $example in */tensor_* | */gpt.c) package=tutti-tensor ;; esac
            proves "the installed $(basename "$example") builds" \
                cc -std=c17 -Wall -Wextra "$example" -o "$folder/example" $(pkg-config --cflags --libs $package) -lm
        done
    }
    for program in c cxx c_static cxx_static; do
        says "pkg-config: $program runs" "sum 3" "$folder/$program"
    done
    [ $has_tensor = 0 ] || says "pkg-config: tensor runs" "sum 6" "$folder/tensor"
    [ $has_tensor = 0 ] || says "pkg-config: the static tensor runs" "sum 6" "$folder/tensor_static"
    proves "pkg-config: a static program needs no libtutti.so" bash -c "! ldd '$folder/c_static' | grep libtutti"
fi

proves "find_package: configures" cmake -S "$outside" -B "$folder/outside" -DCMAKE_PREFIX_PATH="$prefix"
proves "find_package: builds" cmake --build "$folder/outside"
for program in c cxx c_static cxx_static; do
    says "find_package: $program runs" "sum 3" "$folder/outside/$program"
done
if [ $has_tensor = 1 ]; then
    for program in tensor tensor_cxx tensor_static tensor_cxx_static; do
        says "find_package: $program runs" "sum 6" "$folder/outside/$program"
    done
fi
proves "a static program needs no libtutti.so" bash -c "! ldd '$folder/outside/c_static' | grep libtutti"

for plugin in "$TEST_BUILD"/plugins/libtutti-*.so; do
    [ ! -e "$plugin" ] || proves "the plug-in $(basename "$plugin") is installed" test -s "$libraries/tutti/$(basename "$plugin")"
done
# Their GPU kernels take long to build: what they are made from, as the compiler noted it, is no file of C but headers.
for notes in $(find "$TEST_BUILD/src" -name '*.fatbin.d'); do
    says "$(basename "$notes" .fatbin.d): no C file makes these kernels be built again" "" bash -c "tr ' ' '\n' <'$notes' | grep '\.c$' || true"
done

proves "the header for other languages is there" test -s "$prefix/share/tutti/tutti-ffi.h"

# Names with a version are of the API; TUTTI_PRIVATE is what libtutti-tensor takes of the inside.
exported() { nm -D --defined-only --with-symbol-versions "$libraries/$1" | awk '$2 != "A" { print $3 }' | grep -v '@.*TUTTI_PRIVATE'; }
says "libtutti.so exports tutti_ names only" "" bash -c "$(declare -f exported); libraries='$libraries'; exported libtutti.so | grep -v '^tutti_' || true"
proves "libtutti.so exports tutti_all_reduce" bash -c "$(declare -f exported); libraries='$libraries'; exported libtutti.so | grep -q '^tutti_all_reduce@'"
[ $has_tensor = 0 ] ||
    says "libtutti-tensor.so exports tt_ names only" "" \
        bash -c "$(declare -f exported); libraries='$libraries'; exported libtutti-tensor.so | grep -v '^tt_' || true"

for page in "$TEST_SOURCE"/man/*.1; do
    proves "the manual page $(basename "$page") is installed" test -s "$prefix/share/man/man1/$(basename "$page")"
done
for header in "$TEST_SOURCE"/include/tutti/*.h; do
    test -s "$prefix/include/tutti/$(basename "$header")" || report "$(basename "$header") is installed" 1 ""
done
says "the installed command starts the installed program" "sum 3" "$prefix/bin/tutti" run -q -n 1 "$folder/outside/c"
env -u LD_LIBRARY_PATH "$prefix/bin/tutti" info >"$folder/info" 2>&1
proves "the installed command stands alone" grep -q 'version' "$folder/info"
proves "the licence is installed" cmp "$TEST_SOURCE/LICENSE" "$prefix/share/doc/tutti/LICENSE"
proves "the documents are installed" test -s "$prefix/share/doc/tutti/docs/architecture.md"
says "links of the installed documents lead somewhere" "" python3 - "$prefix/share/doc/tutti" <<'EOF'
import pathlib, re, sys
for page in pathlib.Path(sys.argv[1]).rglob("*.md"):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target and not (page.parent / target).exists():
            print(page, target)
EOF
completes() { # the words that follow "tutti", as bash would offer them
    bash -c 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tutti; echo "${COMPREPLY[*]}"' bash \
        "$prefix/share/bash-completion/completions/tutti" "$prefix/bin/tutti" "$@" 2>/dev/null
}
says "bash completes sub-commands" "bench" completes be
says "bash completes options" "--baseline" completes bench --base
says "bash completes operations" "all_reduce" completes bench all_red

# The targets have the same names for a project that adds the source folder to its own. Configuring is enough: a target that does not exist is an error.
cat >"$folder/CMakeLists.txt" <<EOF
cmake_minimum_required(VERSION 3.22)
project(Inside LANGUAGES C)
add_subdirectory($TEST_SOURCE tutti)
file(WRITE \${CMAKE_BINARY_DIR}/main.c "int main(void) { return 0; }")
foreach(name tutti tutti_static \${TENSOR})
  add_executable(uses_\${name} \${CMAKE_BINARY_DIR}/main.c)
  target_link_libraries(uses_\${name} PRIVATE Tutti::\${name})
endforeach()
EOF
tensor=""
[ $has_tensor = 0 ] || tensor="tutti_tensor;tutti_tensor_static"
proves "add_subdirectory: every target has its alias" cmake -S "$folder" -B "$folder/inside" -DTENSOR="$tensor" -DTUTTI_CUDA=OFF

proves "it is uninstalled" cmake -DMANIFEST="$folder/manifest" -P "$TEST_SOURCE/cmake/uninstall.cmake"
says "nothing is left behind" "" find "$prefix" -not -type d
says "no folder of its own is left behind" "" find "$prefix" -iname tutti

echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
