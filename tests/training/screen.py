"""A terminal that remembers its screens: as much of one as Rich's live display asks for."""

import io
import re

CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]")


class Screen(io.StringIO):
    """A stream whose `screens` are what was to be seen after each write, from the first line on."""

    def __init__(self, columns: int):
        super().__init__()
        self.columns, self.lines, self.row, self.column = columns, [""], 0, 0
        self.screens: list[list[str]] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        at = 0
        for control in CONTROLS.finditer(text):
            self.put(text[at : control.start()])
            self.obey(control[0])
            at = control.end()
        self.put(text[at:])
        self.screens.append([line.rstrip() for line in self.lines])
        return len(text)

    def put(self, text: str) -> None:
        for character in text:
            if self.column == self.columns:
                self.obey("\r")
                self.obey("\n")
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def obey(self, control: str) -> None:
        if control == "\r":
            self.column = 0
        elif control == "\n":
            self.row, self.column = self.row + 1, 0
            self.lines += [""] * (self.row + 1 - len(self.lines))
        elif control == "\x1b[2K":
            self.lines[self.row] = ""
        elif control.endswith("A"):
            self.row = max(self.row - int(control[2:-1] or 1), 0)
        else:
            assert control[-1] in "mhl", f"{control!r} is not known here"
