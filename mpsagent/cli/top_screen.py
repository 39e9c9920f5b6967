"""``mpsagent-cli top`` on a terminal: curses around :mod:`top_page`, and what the keys do.

The agent is asked at every refresh. One that does not answer is said, and asked again; what was there stays readable.
"""

from __future__ import annotations

import curses
import locale
import os
import sys
import time
from contextlib import suppress

from mpsagent.cli import ask, client
from mpsagent.cli.tables import padded
from mpsagent.cli.top_page import ScreenLine, TopView, page, rows
from mpsagent.cli.wording import Json, safe, user

ANSWER = 3.0
"""Seconds that an answer is waited for; keys wait as long."""
_ESCAPE = "\x1b"
_MOVES = (curses.KEY_UP, curses.KEY_DOWN, curses.KEY_PPAGE, curses.KEY_NPAGE, curses.KEY_HOME, curses.KEY_END)
_COLOURS = {"bad": curses.COLOR_RED, "warn": curses.COLOR_YELLOW}


class Screen:
    """One terminal. ``every``: seconds between two looks."""

    def __init__(self, path: str, every: float) -> None:
        self._path, self._every = path, every
        self._view = TopView()
        self._status: Json | None = None
        self._clients: list[Json] = []
        self._due = 0.0
        self._before = ""
        self._typing: str | None = None
        self._ending: Json | None = None
        self._styles: dict[str, int] = {}

    def run(self, screen: curses.window) -> None:
        with suppress(curses.error):
            curses.curs_set(0)
        self._paints()
        while True:
            if time.monotonic() >= self._due:
                self._look()
            self._draw(screen)
            screen.timeout(max(0, int((self._due - time.monotonic()) * 1000)))
            try:
                key = screen.get_wch()
            except curses.error:  # no key until the next look
                continue
            if self._key(key, screen.getmaxyx()[0]):
                return

    # --- looking and drawing

    def _look(self) -> None:
        """Ask the agent again; what went wrong is the message until it goes right."""
        self._due = time.monotonic() + self._every
        try:
            self._status = client.ask(self._path, "/v1/status", timeout=ANSWER)[0]
            self._clients = ask.command_lines(client.ask(self._path, "/v1/clients", timeout=ANSWER)[0]["clients"])
            if self._view.message.startswith("mpsagent "):
                self._view.message = ""
        except (client.Unreachable, client.RequestRefused) as gone:
            self._view.message = safe(f"mpsagent does not answer: {gone}", 300)

    def _draw(self, screen: curses.window) -> None:
        height, width = screen.getmaxyx()
        if self._status is None:
            lines = [ScreenLine(self._view.message, "bad")]
        else:
            lines = page(self._status, self._clients, self._view, ask.now(), width, height)
        screen.erase()
        for number, line in enumerate(lines[:height]):
            text = padded(line.text, width) if line.style in ("head", "chosen") else line.text
            with suppress(curses.error):  # the last cell of the last line cannot be written without scrolling
                screen.addnstr(number, 0, text, width, self._styles.get(line.style, curses.A_NORMAL))
        screen.refresh()

    def _paints(self) -> None:
        self._styles = {"head": curses.A_REVERSE, "chosen": curses.A_BOLD | curses.A_REVERSE, "dim": curses.A_DIM}
        self._styles |= {"bad": curses.A_BOLD, "warn": curses.A_BOLD}
        with suppress(curses.error):
            curses.start_color()
            curses.use_default_colors()  # without it curses paints white on black, also where no colour is asked for
            if not os.environ.get("NO_COLOR"):
                for number, (style, colour) in enumerate(_COLOURS.items(), 1):
                    curses.init_pair(number, colour, -1)
                    self._styles[style] = curses.color_pair(number) | curses.A_BOLD

    # --- keys

    def _key(self, key: int | str, height: int) -> bool:
        """Whether that was the last."""
        view = self._view
        if self._typing is not None:
            self._type(key)
        elif self._ending is not None:
            self._answered(key)
        elif key in ("q", "Q"):
            return True
        elif key in _MOVES:
            self._move(int(key), height)
        elif key in ("s", "S"):
            step = 1 if key == "s" else -1
            view.sort[view.users] = (view.sort[view.users] + step) % len(view.columns)
            self._to_the_top()
        elif key == "r":
            view.reverse = not view.reverse
            self._to_the_top()
        elif key == "u":
            view.users = not view.users
            self._to_the_top()
        elif key == "/":
            self._before, self._typing = view.filter, view.filter
            self._type("")
        elif key == _ESCAPE:
            view.filter = view.message = ""
        elif key == "k":
            self._ask()
        elif key in (" ", "\n"):
            view.message, self._due = "", 0.0
        return False

    def _to_the_top(self) -> None:
        self._view.chosen, self._view.first = None, 0

    def _move(self, key: int, height: int) -> None:
        view = self._view
        if self._status is None:
            return
        found = rows(self._status, self._clients, view)
        count = len(found)
        pids = [] if view.users else [one["pid"] for one in found]
        at = pids.index(view.chosen) if view.chosen in pids else view.first
        most = max(1, height - 9)
        step = {curses.KEY_UP: -1, curses.KEY_DOWN: 1, curses.KEY_PPAGE: -most, curses.KEY_NPAGE: most}.get(key, count)
        at = max(0, min(count - 1, at + (-count if key == curses.KEY_HOME else step)))
        if view.users:
            view.first = at
        elif pids:
            view.chosen = pids[at]

    def _type(self, key: int | str) -> None:
        """The filter, shown as it is typed; escape takes it back."""
        text = self._typing or ""
        if key in ("\n", "\r", curses.KEY_ENTER):
            self._view.filter, self._view.question, self._typing = text, "", None
            return
        if key == _ESCAPE:
            self._view.filter, self._view.question, self._typing = self._before, "", None
            return
        if key in (curses.KEY_BACKSPACE, "\x7f", "\b"):
            text = text[:-1]
        elif isinstance(key, str) and key.isprintable():
            text = (text + key)[:60]
        self._typing = self._view.filter = text
        self._view.question = f"only with: {text}_   (a user, a pid, a state, words of the command; Enter)"

    def _ask(self) -> None:
        """Before a client is ended: which one is chosen may have changed under the finger."""
        chosen = [one for one in self._clients if one["pid"] == self._view.chosen and not self._view.users]
        if not chosen:
            self._view.message = "no client is chosen: ↑ and ↓ choose one, u shows clients"
        elif chosen[0]["state"] == "waiting":
            self._view.message = f"process {chosen[0]['pid']} waits at the gate and has nothing that mpsagent could end"
        else:
            self._ending = chosen[0]
            one = f"client {chosen[0]['pid']} of {user(chosen[0])}"  # the command last: a narrow terminal cuts it
            self._view.question = f"y/N: end {one}? Its work is lost. ({safe(chosen[0]['command'] or '-', 60)})"

    def _answered(self, key: int | str) -> None:
        one, self._ending, self._view.question = self._ending, None, ""
        assert one is not None
        if key not in ("y", "Y"):
            self._view.message = f"client {one['pid']} was left alone"
            return
        try:
            client.order(self._path, "terminate", {"pid": one["pid"]}, ANSWER)
            self._view.message = f"client {one['pid']} is being ended"
        except client.RequestRefused as refused:
            told = refused.error
            self._view.message = safe(f"not ended: {told.get('detail', refused)}; {told.get('hint', '')}", 300)
        except client.Unreachable as gone:
            self._view.message = safe(f"not ended: {gone}", 300)
        self._due = 0.0


def show(path: str, every: float) -> None:
    """Until the person leaves."""
    locale.setlocale(locale.LC_ALL, "")
    os.environ.setdefault("ESCDELAY", "25")
    try:
        curses.wrapper(Screen(path, every).run)
    except KeyboardInterrupt:
        pass
    except curses.error as error:
        term = os.environ.get("TERM") or "not set"
        text = f"this terminal cannot do it ({error}); TERM is {term}; one page: mpsagent-cli top | cat"
        print(f"Error: {text}", file=sys.stderr)
        sys.exit(ask.UNHEALTHY)
