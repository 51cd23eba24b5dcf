"""A meter: what one sender may cost the leader, and what it did, in units of `core.work`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from anabranch.ports import Clock

SHARES = 20  # a second: a sender that has to wait goes on with this share of a second's units


@dataclass(slots=True)
class Meter:
    """The account of a lane, or of a stream's journals.

    ``rate``: units a second, 0: any. ``left``: what it may be charged now, a second's worth at most. A charge may
    exceed it: then it is below 0, a debt, and its owner waits until time has paid that off. ``used``: charged in
    all. ``served``: the same, as it counts for turns: see `join`. ``drawn``: what the journals of a lane's streams
    cost, in all.
    """

    clock: Clock
    rate: int = 0
    left: float = 0.0
    used: int = 0
    served: int = 0
    drawn: int = 0
    _lent: float = 0.0  # what journals drew beyond what was spare: paid before they draw again
    _filled: float = 0.0  # when it was filled last, monotonic seconds

    def set_rate(self, rate: int) -> None:
        """Go on at this rate; one that had none, or a new one, begins with a second's worth."""
        if not self.rate:
            self.left, self._filled = float(rate), self.clock.monotonic()
        self.rate = rate

    def fill(self) -> None:
        """Let what is left grow with the time that passed."""
        if self.rate:
            now = self.clock.monotonic()
            self.left = min(self.rate, self.left + (now - self._filled) * self.rate)
            self._filled = now
            paid = max(0.0, min(self._lent, self.left - self.rate / 2))
            self.left, self._lent = self.left - paid, self._lent - paid

    def charge(self, units: int, *, free: bool = False) -> None:
        """Take units off what is left; ``free``: count them only, as no other needs the leader."""
        self.fill()
        self.used += units
        self.served += units
        if self.rate and not free:
            self.left -= units

    @property
    def spare(self) -> float:
        """The units that others may draw: those beyond half a second's worth, which stays for its own work."""
        self.fill()
        return max(0.0, self.left - self.rate / 2) if self.rate else math.inf

    def draw(self, units: int, *, free: bool) -> None:
        """Take units of journals off what is spare; ``free``: count them only."""
        self.drawn += units
        if self.rate and not free:
            taken = min(float(units), self.spare)
            self.left, self._lent = self.left - taken, self._lent + units - taken

    def spare_in_s(self) -> float:
        """Seconds until there is something spare."""
        missing = 1 + self.rate / 2 + self._lent - self.left
        return max(0.0, missing / self.rate) if self.rate else 0.0

    def join(self, waiting: Collection[Meter], others: Iterable[Meter]) -> None:
        """Begin to wait for turns. Its owner saved up none, and has to make up for none.

        ``waiting``: of the others, those that wait for turns.
        """
        served = [meter.served for meter in waiting]
        least = min(served) if served else max([meter.served for meter in others], default=0)
        self.served = max(self.served, least)  # or an owner of one command came first each time

    @property
    def debt(self) -> int:
        """Units that time has to pay off before anything more of its owner goes on."""
        self.fill()
        return max(0, -int(self.left)) if self.rate else 0

    def wait_s(self, wanted: int) -> float:
        """Seconds until work of this forecast may begin: it goes on in shares of a second, not bit by bit."""
        if not self.rate:
            return 0.0
        return (min(wanted, max(1, self.rate // SHARES)) - self.left) / self.rate
