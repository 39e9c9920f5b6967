"""How many each user has of something, and who has most, both at once: one user may come with thousands of uids."""

from __future__ import annotations


class Counts:
    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._with: dict[int, dict[int, None]] = {}
        """Users by how many they have, in the order in which they came to have so many."""
        self._greatest = 0

    def __getitem__(self, uid: int) -> int:
        return self._of.get(uid, 0)

    def most(self) -> int | None:
        """Who has most; of several, who has had so many for longest."""
        return next(iter(self._with.get(self._greatest, ())), None)

    def add(self, uid: int) -> None:
        self._put(uid, self[uid] + 1)

    def remove(self, uid: int) -> None:
        """One that was added."""
        self._put(uid, self[uid] - 1)

    def _put(self, uid: int, count: int) -> None:
        before = self._of.pop(uid, 0)
        if before:
            same = self._with[before]
            del same[uid]
            if not same:
                del self._with[before]
        if count:
            self._of[uid] = count
            self._with.setdefault(count, {})[uid] = None
        # it changes by one at a time, so no user has a number in between
        self._greatest = max(self._greatest, count) if self._greatest in self._with else count
