"""Transcripts made comparable: what differs from run to run goes out, what MPS decides stays.

Pure. Takes the text of a transcript (a rig's or a recording's, the form is one) and gives its sections, each as streams
of lines: the steps with their answers, control.log, server.log, and what every client printed. The two logs are streams
of their own because their lines interleave by chance.

- process ids become names: c1, c2, ... clients in order of appearance, S1, ... servers, D1, ... daemons;
- user ids become A, B, C, D; UUIDs GPU1, ...; directories PIPE, PIPE2, ...; the program of a client PROGRAM;
- times, latencies and free-running numbers go; a delay that matters becomes a coarse class;
- free memory becomes "most" or the nearest GiB that a limit could have meant;
- what repeats (the back-off, a question asked until its answer changed) is there once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.conformance import repeats

USERS: Mapping[str, str] = {
    number: name
    for name, numbers in {
        "A": "1001 20001",
        "B": "1002 20002",
        "C": "1003 20003",
        "D": "1004 20004",
        "nobody": "65534",
        "root": "0",
    }.items()
    for number in numbers.split()
}

STAMPED = re.compile(r"^\[ *[\d.]+\] (.*)$", re.DOTALL)
HEADING = re.compile(r"^=+ (\S+) ?(.*)$")
LOGGED = re.compile(r"^   (\w+)\.log\*?\| (.*)$", re.DOTALL)
LOG_LINE = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:.]+ (\w+) +(\d+)\] (.*)$", re.DOTALL)
CLIENT_LINE = re.compile(r"^   (c\d+)\| (.*)$", re.DOTALL)
CLIENT_PREFIX = re.compile(r"^\[ *[\d.]+ pid \d+ uid \d+\] ")
SPAWN = re.compile(r"^spawn (c\d+) pid (\d+) uid (\d+) \((.*?),?\) ?(\{.*\})?\s*$", re.DOTALL)
ENDED = re.compile(r"^(c\d+) pid \d+ rc=(\S+) output:$")
CTL = re.compile(
    r"^ctl(?: as (\d+))?(?: in (\w+))?> ('.*?'|\".*?\") (?:rc=(\S+) ([\d.]+)ms out=(.*) err=(.*)|TIMEOUT.*)$", re.S
)
CTL_AS = re.compile(r"^as (\d+)> (.*) rc (\d+) ('.*'|\".*\") ('.*'|\".*\")$", re.DOTALL)
START = re.compile(r"^start(?: in \w+)? (?:(\(.*?\)) ?)?(?:with (\{.*\}) )?rc[= ](\S+) (.*)$", re.DOTALL)
UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){0,3}(?:-[0-9a-f]{12})?")
# A number that is not part of a word or of a decimal.
NUMBER = re.compile(r"(?<![\w.:-])\d+(?![\w:]|\.\d\d*\b(?!\s*$))")
TABLE_ROW = re.compile(r"^(\d+ +\d+ +)(\d+)( +)(GPU-\S+)( +)(\d+)( +)(.*)$")
# What scripts wrote about themselves; not MPS's.
REMARKS = re.compile(
    r"^(ready after|reacted in|pre-armed|EXPECT|CHECK|correct |took |gone in|reaped|culprit|dmesg|\[\s*\d|NVRM|ladder "
    r"|spin client|quit -t|plain quit|recovered|SIGKILL of a client|exec |set in ms|B served|server.log lines|instance "
    r"|MPS o|exists after|after truncate|server.log exists|\[?'GPU-|control rc after|fg stdout|   nvml|second same pipe"
    r"|other pipe|failed to|an idle|of a |and a client|.*start_server for|# )"
)


@dataclass
class Section:
    """One played scenario (or what came before it), normalised."""

    name: str
    title: str
    steps: list[str] = field(default_factory=list)
    logs: dict[str, list[str]] = field(default_factory=dict)
    clients: dict[str, list[str]] = field(default_factory=dict)

    def streams(self) -> dict[str, list[str]]:
        """Stream name -> lines, in the order in which a person reads them."""
        return {
            "steps": self.steps,
            **{f"{name}.log": lines for name, lines in sorted(self.logs.items())},
            "clients": [f"{name} {line}" for name, lines in self.clients.items() for line in lines],
        }

    def text(self) -> str:
        parts = [f"==== {self.name} {self.title}".rstrip()]
        for stream, lines in self.streams().items():
            parts += [f"-- {stream}", *lines] if lines else []
        return "\n".join(parts) + "\n"


@dataclass
class _Raw:
    name: str
    title: str
    lines: list[str] = field(default_factory=list)


@dataclass
class Names:
    """Which number is what, learned from a whole transcript; the names are given section by section."""

    kinds: dict[str, str] = field(default_factory=dict)  # pid -> "c", "S" or "D"
    uuids: list[str] = field(default_factory=list)
    pipes: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    gpus: dict[str, str] = field(default_factory=dict)

    def learn(self, text: str) -> None:
        for pattern, kind in (
            (r"Control +(\d{2,})\] Starting control daemon", "D"),
            (r"Starting new server (\d+) for user", "S"),
            (r" Server +(\d+)\] ", "S"),
            (r"\] NEW CLIENT (\d{2,}) from user ", "c"),
            (r"\] Client \{PID: (\d+), Context ID: \d+\} connected$", "c"),
            (r"^\[ *[\d.]+\] spawn c\d+ pid (\d+) ", "c"),
        ):
            for match in re.finditer(pattern, text, re.MULTILINE):
                self.kinds[match[1]] = kind
        for match in re.finditer(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", text):
            if match[0] not in self.uuids:
                self.uuids.append(match[0])
        for match in re.finditer(r"using socket (\S+)/control$", text, re.MULTILINE):
            if match[1] not in self.pipes:
                self.pipes.append(match[1])
        self.logs = re.findall(r"Using log directory: (\S+)", text)

    def new_section(self) -> None:
        self.given, self.counts, self.gpus = {}, {}, {}

    def pid(self, number: str) -> str:
        """The name of a process, given now if it has none; the number itself if nobody knows it."""
        kind = self.kinds.get(number)
        if kind is None:
            return number
        if number not in self.given:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.given[number] = f"{kind}{self.counts[kind]}"
        return self.given[number]

    def gpu(self, shown: str) -> str:
        full = next((uuid for uuid in self.uuids if uuid.startswith(shown)), shown)
        return self.gpus.setdefault(full, f"GPU{len(self.gpus) + 1}")

    def text(self, text: str) -> str:
        """Everything that has a name replaced by it."""
        for pipe in sorted(self.pipes, key=len, reverse=True):
            number = self.pipes.index(pipe) + 1
            text = text.replace(pipe, f"PIPE{number if number > 1 else ''}")
        for log in self.logs:
            text = text.replace(log, "LOG")
        text = UUID.sub(lambda match: self.gpu(match[0]), text)
        text = re.sub(r"(?<![\w:])[0-9a-f]{4}:[0-9a-f]{2}\.[0-9a-f]{2}\.[0-9a-f]{2}\b|\b\d\d:\d\d\.\d\b", "PCI", text)
        text = re.sub(r"\b(user|uid|UID|-uid|as) (\d+)\b", lambda m: f"{m[1]} {USERS.get(m[2], m[2])}", text)
        text = re.sub(r"\bmps\.shm\.(\d+)\.", lambda m: f"mps.shm.{USERS.get(m[1], m[1])}.", text)
        return re.sub(r"(?<![\w-])(?<!version: )(?<!with status )\d{2,}(?![\w%])", lambda m: self.pid(m[0]), text)


def sections(text: str, *, one_run: bool = False, whole: bool = False) -> list[Section]:
    """The sections of a transcript. `one_run`: all of it is one history, as in the recordings; otherwise every
    scenario, with what came before it, is one of its own. `whole`: a scenario and what came before it are one section
    (where a log line falls at the cut is chance), and scenarios that did not reach their end are left out."""
    raw = list(_split(text))
    if whole:
        raw = list(_wholes(raw))
    names = Names()
    if one_run:
        names.learn(text)
    found = []
    for number, part in enumerate(raw):
        if not one_run and not (number and _same_scenario(raw[number - 1], part)):
            following = raw[number + 1 : number + 2]
            group = [part, *(each for each in following if _same_scenario(part, each))]
            names = Names()
            names.learn("\n".join(line for each in group for line in each.lines))
        names.new_section()
        found.append(_normalise(part, names))
    return found


def _wholes(parts: Sequence[_Raw]) -> Iterator[_Raw]:
    joined: dict[str, _Raw] = {}
    for part in parts:
        if part.name in joined:
            joined[part.name].lines += part.lines
            joined[part.name].title = part.title
        else:
            joined[part.name] = _Raw(part.name, part.title, list(part.lines))
    yield from (one for one in joined.values() if not any("] BROKEN OFF" in line for line in one.lines))


def _same_scenario(before: _Raw, after: _Raw) -> bool:
    return before.name == after.name and before.title == "before"


def _split(text: str) -> Iterator[_Raw]:
    current: _Raw | None = None
    for line in text.removesuffix("\n").split("\n"):
        stamped = STAMPED.match(line)
        heading = HEADING.match(stamped[1]) if stamped else None
        if heading:
            if current is not None:
                yield current
            current = _Raw(heading[1], heading[2])
        elif current is not None:
            if stamped or not current.lines:
                current.lines.append(line)
            elif not line.startswith("# ") and not LOGGED.match(STAMPED.sub(r"\1", current.lines[-1])):
                current.lines[-1] += "\n" + line  # the rest of a remark of several lines
    if current is not None:
        yield current


def _normalise(raw: _Raw, names: Names) -> Section:
    section = Section(raw.name, raw.title)
    clients: dict[str, str] = {}  # their name in the transcript -> name here
    outputs: dict[str, list[str]] = {}
    for line in raw.lines:
        if match := SPAWN.match(STAMPED.sub(r"\1", line)):
            clients[match[1]] = names.pid(match[2])
    logs: dict[str, list[str]] = {}
    stale = _before_the_last_server(raw.lines)
    directory = ""
    for stamped in raw.lines:
        match = STAMPED.match(stamped)
        line = match[1] if match else stamped
        if match := LOGGED.match(line):
            if stamped in stale:
                continue
            logs.setdefault(match[1], []).append(_log_line(match[2], names))
        elif LOG_LINE.match(line):
            # A recording that printed the logs of further instances as they were.
            label = "control"
            for each in line.split("\n"):
                if prefixed := LOG_LINE.match(each):
                    label = "control" if prefixed[1] == "Control" else "server"
                if each.strip():
                    logs.setdefault(label, []).append(_log_line(each, names))
        elif match := re.match(r"^   fg\| (.*)$", line):
            logs.setdefault("foreground", []).append(_log_line(match[1], names))
        elif match := CLIENT_LINE.match(line):
            outputs.setdefault(clients.get(match[1], match[1]), []).append(_client_line(match[2], names))
        elif match := ENDED.match(line):
            name = clients.setdefault(match[1], f"old-{match[1]}")
            outputs[name] = []  # printed again from its beginning
            section.steps.append(f"{name} {'still runs' if match[2] == 'None' else 'ended ' + match[2]}")
        elif line.startswith("   ls| "):
            directory, shown = _listing(line[7:], directory)
            section.steps += shown
        elif line.startswith("   ps| "):
            section.steps += _process(line[7:], names)
        else:
            section.steps += _step(line, names)
    section.logs = {name: repeats.squeeze(repeats.backed_off(lines)) for name, lines in logs.items()}
    section.clients = dict(sorted(outputs.items(), key=lambda item: _natural(item[0])))
    return section


def _before_the_last_server(lines: Sequence[str]) -> set[str]:
    """One section of a recording prints the whole server.log, marked `server.log*`; only the last server is its own."""
    dumped = [line for line in lines if "server.log*| " in line]
    servers = [match[1] for line in dumped if (match := re.search(r" Server +(\d+)\] ", line))]
    if not servers:
        return set()
    return {line for line in dumped if not re.search(rf" (?:Server|Other) +{servers[-1]}\] ", line)}


def _natural(name: str) -> tuple[str, int]:
    return name.rstrip("0123456789"), int(re.sub(r"\D", "", name) or 0)


def _log_line(line: str, names: Names) -> str:
    match = LOG_LINE.match(line)
    text = match[3] if match else line
    text = re.sub(r"(Received new client request for) \{PID: -?\d+, Context ID: -?\d+\}", r"\1 {...}", text)
    if row := TABLE_ROW.match(text):
        text = _row(row, names)
    text = names.text(text)
    # Whichever client is named here is chance: the line blames the wrong one at times (recording 02, R4).
    text = re.sub(r"^Client \{PID: \S+, Context: \d+\} (encountered a fatal)", r"Client {one of them} \1", text)
    if not match:
        return f"(no prefix) {text}"
    name = names.pid(match[2])
    return f"{match[1]} {name if not name.isdigit() else 'other'}: {text}"


def _row(row: re.Match[str], names: Names) -> str:
    """A line of `ps`. Columns keep their width: a name is padded to the length of its number."""
    pid = row[1].split()[0]
    first = names.pid(pid).ljust(len(pid)) + row[1][len(pid) :]
    return f"{first}{names.pid(row[2]).ljust(len(row[2]))}{row[3]}{names.gpu(row[4])}{row[5]}NAMESPACE{row[7]}PROGRAM"


def _client_line(line: str, names: Names) -> str:
    text = CLIENT_PREFIX.sub("", line)
    text = re.sub(r" after [\d.]+ s$", "", text)
    text = re.sub(r"done \d+ iterations", "done", text)
    text = re.sub(r"free (\d+) MiB total (\d+) MiB", lambda m: _memory(int(m[1]), int(m[2])), text)
    return UUID.sub(lambda match: names.gpu(match[0]), text)


def _memory(free: int, total: int) -> str:
    # Context overhead is 100 to 500 MiB of every limit, so a quarter GiB is added before rounding.
    shown = "most" if free > 0.95 * total else f"{round((free + 256) / 1024)} GiB"
    return f"free {shown} total {total} MiB"


def delay_class(seconds: float) -> str:
    for limit, name in ((0.3, "at once"), (1.0, "under 1 s"), (3.0, "1 to 3 s"), (10.0, "3 to 10 s")):
        if seconds < limit:
            return name
    return "over 10 s"


def _listing(line: str, directory: str) -> tuple[str, list[str]]:
    """Entries of the log and the pipe directory: type, mode, owner, name."""
    if line.endswith(":"):
        kind = line[:-1].rsplit("/", 1)[-1]
        return kind, [f"ls {kind}:"] if kind.startswith(("log", "pipe")) else []
    fields = line.split(None, 8)
    if not directory.startswith(("log", "pipe")) or len(fields) < 9 or fields[8] in (".", ".."):
        return directory, []
    owner = fields[2].replace("root", "0")
    return directory, [f"ls   {fields[0]} {owner} {fields[8]}"]


def _process(line: str, names: Names) -> list[str]:
    fields = line.split(None, 4)
    name = names.pid(fields[0])
    arguments = fields[4] if len(fields) > 4 else ""
    if name[0] == "c":
        arguments = "PROGRAM"
    elif name == fields[0]:
        # A front-end that waits, or a daemon in the foreground, whose log lines went elsewhere.
        name = "other"
    arguments = re.sub(r"^\S*python\S* -\w+ (?=\S*nvidia-cuda-mps)", "", arguments)  # the simulator's front-end
    arguments = re.sub(r"\S*/(nvidia-cuda-mps-\w+)", r"\1", arguments).strip()
    # Whether it happens to be on a CPU (R) is chance; stopped (T) and dead (Z) are not.
    state = fields[3][0].replace("R", "S")
    return [f"ps {name} {USERS.get(fields[2], fields[2])} {state} {arguments}"]


def _step(line: str, names: Names) -> list[str]:
    if match := SPAWN.match(line):
        what = [part.strip().strip("'") for part in match[4].split(",") if part.strip()]
        what = what[:2] if what[0] == "alloc" else what[:1]  # durations are the script's
        extra = f" {names.text(match[5])}" if match[5] and match[5] != "{}" else ""
        return [f"spawn {names.pid(match[2])} {USERS.get(match[3], match[3])} {' '.join(what)}{extra}"]
    if match := CTL_AS.match(line):
        command, out, err = match[2], ast.literal_eval(match[4]), ast.literal_eval(match[5])
        return _answer(f"ctl as {USERS.get(match[1], match[1])}", command, match[3], 0.0, out, err, names)
    if match := CTL.match(line):
        who = f"ctl as {USERS.get(match[1], match[1])}" if match[1] else "ctl"
        who += f" in {match[2]}" if match[2] else ""
        command = ast.literal_eval(match[3])
        if match[4] is None:
            return [f"{who} {one_line(names.text(command))} -> no answer"]
        out, err = ast.literal_eval(match[6]), ast.literal_eval(match[7])
        return _answer(who, command, match[4], float(match[5]) / 1000, out, err, names)
    if match := START.match(line):
        environment = f" with {names.text(match[2])}" if match[2] else ""
        said = "" if match[4].replace("out='' err=''", "").strip() == "" else f" {match[4]}"
        options = match[1] or "('-d',)"
        return [f"start {options}{environment} rc={match[3]}{said}"]
    if match := re.match(r"^DELAY (.*) ([\d.]+)$", line):
        return [f"delay {match[1]}: {delay_class(float(match[2]))}"]
    if match := re.match(r"^served ([\d.]+) s (.*)$", line):
        return [f"delay served {match[2]}: {delay_class(float(match[1]))}"]
    if match := re.match(r"^SWITCH (.*) hold=\d+ gap=([\d.]+)$", line):
        return [f"switch {match[1]}: {delay_class(float(match[2]))}"]
    if match := re.match(r"^(\[.*?\]) rc (\S+) OUT (.*)$", line, re.DOTALL):
        return [
            f"option {match[1]} rc={match[2]}",
            *(f"  {each.rstrip()}" for each in match[3].split("\n") if each.strip()),
        ]
    if REMARKS.match(line) or not line.strip():
        return []
    return [names.text(line)]


def one_line(text: str) -> str:
    return text.replace("\n", " / ")


def _answer(who: str, command: str, rc: str, seconds: float, out: str, err: str, names: Names) -> list[str]:
    # Starting a Python process takes a while on a busy machine, so only long waits are told apart.
    slow = "" if seconds < 0.6 else f" (took {delay_class(seconds)})"
    lines = [f"{who} {one_line(names.text(command))} -> rc={rc}{slow}"]
    for kind, text in (("", out), ("err: ", err)):
        for each in text.split("\n")[:-1] if text.endswith("\n") else [text] if text else []:
            row = TABLE_ROW.match(each)
            lines.append(f"  {kind}{names.text(_row(row, names) if row else each)}")
    return lines


def kinds(lines: Iterable[str]) -> set[str]:
    """Lines without their particulars: what remains comparable when two scripts differ in length and order."""
    found = set()
    for line in lines:
        general = re.sub(r"\b(old-c|[cSD])\d+\b", r"\1", line.replace("old-c", "c"))
        general = re.sub(r"Number of active client contexts is \d+", "Number of active client contexts is N", general)
        general = re.sub(r"\bin at most \d+ms", "in at most N ms", general)
        general = re.sub(r"\b(PIPE|GPU)\d+", r"\1", general)
        general = re.sub(r"\bc +\d+ +S +GPU", "c N S GPU", general)  # the number counts all clients of the daemon
        general = re.sub(r"(quit.*(?:timeout of|-t)) \d+", r"\1 N", general)
        found.add(re.sub(r" +", " ", general))
    return found
