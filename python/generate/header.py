# SPDX-License-Identifier: Apache-2.0
"""What tutti-ffi.h declares: constants, structs and functions, and the comments that the public headers have on them."""
import re

LETTERS = {"void": "v", "bool": "?", "char": "c", "int": "i", "unsigned": "I", "uint8_t": "B", "int16_t": "h", "uint16_t": "H", "int32_t": "i", "uint32_t": "I",
           "int64_t": "q", "uint64_t": "Q", "size_t": "z", "double": "d", "float": "f", "tutti_device": "i"}


class Argument:
    """kind is the type as it is written, without const and names: "tt_tensor *", "int"."""

    def __init__(self, declaration):
        declaration = " ".join(declaration.split())
        self.declaration = declaration
        self.callback = "(*" in declaration
        if self.callback:
            self.name, self.kind = re.search(r"\(\*(\w+)\)", declaration)[1], "callback"
            return
        self.name = re.search(r"(\w+)(?:\[\w*\])?$", declaration)[1]
        kind = declaration[:re.search(r"\w+(\[\w*\])?$", declaration).start()].strip() + (" *" if declaration.endswith("]") else "")
        self.kind = re.sub(r"\s*(\*+)$", r" \1", re.sub(r"\bstruct ", "", kind)).strip()


class Function:
    def __init__(self, name, result, arguments, letters):
        self.name, self.result, self.arguments, self.letters = name, result, arguments, letters


class Header:
    def __init__(self, text):
        self.text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
        self.constants, self.structs, self.functions = {}, {}, {}
        self.enums, self.callbacks = set(), set()
        for statement in self.statements():
            self.take(" ".join(statement.split()))

    @property
    def version(self):
        return ".".join(str(self.constants[f"TUTTI_VERSION_{part}"]) for part in ("MAJOR", "MINOR", "PATCH"))

    def statements(self):
        depth, start = 0, 0
        for at, char in enumerate(self.text):
            depth += {"{": 1, "}": -1}.get(char, 0)
            if char == ";" and depth == 0:
                yield self.text[start:at].strip()
                start = at + 1

    def take(self, statement):
        enum = re.fullmatch(r"(?:typedef )?enum(?: \w+)? \{(.*)\}(?: (\w+))?", statement)
        if enum:
            if enum[2]:
                self.enums.add(enum[2])
            for entry in enum[1].split(","):
                name, value = entry.split("=")
                self.constants[name.strip()] = int(value.strip(), 0)
            return
        struct = re.fullmatch(r"typedef struct \w+ \{(.*)\} (\w+)", statement)
        if struct:
            self.structs[struct[2]] = self.fields(struct[1])
            return
        callback = re.match(r"typedef [\w ]+?[ *]+(\w+)\(", statement)
        if callback:
            self.callbacks.add(callback[1])
            return
        if statement.startswith(("typedef", "struct")):
            return
        function = re.fullmatch(r"(.*?)(\w+)\((.*)\)", statement)
        if function is None:
            raise SystemExit(f"scripts/python: not understood: {statement}")
        if "..." not in function[3]:
            arguments = [] if function[3] == "void" else self.split(function[3])
            letters = self.letter(function[1] + " result") + "".join(self.letter(part) for part in arguments)
            self.functions[function[2]] = Function(function[2], Argument(function[1] + " result").kind, [Argument(part) for part in arguments], letters)

    @staticmethod
    def split(arguments):
        """At commas outside of parentheses."""
        depth, part, parts = 0, "", []
        for char in arguments:
            depth += {"(": 1, ")": -1}.get(char, 0)
            if char == "," and depth == 0:
                parts.append(part)
                part = ""
            else:
                part += char
        return parts + [part]

    def letter(self, declaration):
        """Of an argument or a result."""
        declaration = declaration.strip()
        if "(*" in declaration:
            return "F"
        kind = re.sub(r"\b(const|struct)\b", "", declaration[:re.search(r"\w+(\[\w*\])?$", declaration).start()]).strip()
        if kind in self.callbacks or kind.rstrip("* ") in self.callbacks:
            return "F"
        if "*" in kind or declaration.endswith("]"):
            return "s" if re.fullmatch(r"const char ?\*", declaration[:declaration.rfind("*") + 1].strip()) and kind.count("*") == 1 else "P"
        if kind in self.structs:
            return "{" + kind + "}"
        return "i" if kind in self.enums else LETTERS[kind]

    def fields(self, body):
        """name:letter, in order."""
        found = []
        for declaration in body.split(";"):
            declaration = declaration.strip()
            if not declaration:
                continue
            if "(*" in declaration:
                found.append((re.search(r"\(\*(\w+)\)", declaration)[1], "F"))
                continue
            first, *more = declaration.split(",")
            kind = first[:re.search(r"\w+(\[\w+\])*$", first).start()]
            for name in [first[len(kind):]] + [part.strip() for part in more]:
                pointer = kind + "*" * (len(name) - len(name.lstrip("*")))
                array = re.findall(r"\[(\w+)\]", name)
                bare = name.lstrip("*").split("[")[0]
                letter = self.letter(f"{pointer} {bare}")
                for count in array:
                    letter = str(self.constants.get(count) or int(count)) + letter
                found.append((bare, letter))
        return " ".join(f"{name}:{letter}" for name, letter in found)


def sentences(comment):
    """The words of a comment, on one line."""
    lines = [re.sub(r"^\s*\*? ?", "", line) for line in comment.strip().split("\n")]
    return " ".join(" ".join(lines).split())


def comments(folder):
    """What the headers say about each function: the comment in front of it, or behind it on its line."""
    found = {}
    pattern = re.compile(r"(?:/\*((?:(?!\*/).)*)\*/\s*)?TUTTI_API\s+((?:(?!/\*|;).)*?)(\w+)\(((?:(?!;).)*?)\)[^;()]*(?:\([^;]*\))?;(?:[ \t]*/\*((?:(?!\*/).)*)\*/)?", re.S)
    for path in sorted(folder.glob("*.h")):
        before = ""
        for match in pattern.finditer(path.read_text()):
            text = sentences(match[5] or match[1] or "")
            if text.startswith(("The same", "And that")):  # the neighbour above
                text = f"As {before}: {text[0].lower()}{text[1:]}"
            if text and not text.startswith("----"):
                found[match[3]] = text
            before = match[3]
    return found
