"""A decision about the live policy, and how it reads on the wire, in the status and to people."""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# Why a decision is what it is; labels of a metric, so the list is closed.
BETTER = "better"
BEST = "best"
MARGIN = "margin"
DWELL = "dwell"
RESIDUAL = "residual"
WARMING = "warming"
EVIDENCE = "evidence"
REASONS: tuple[str, ...] = (BETTER, BEST, MARGIN, DWELL, RESIDUAL, WARMING, EVIDENCE)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the estimator says at the end of a window; rates are shares of prompt tokens, 0 to 1."""

    t: float
    """When it was taken."""
    policy: str
    """What shall be live from now on; the live policy unless `switch`."""
    live: str
    """What was live during the window."""
    since: float
    """Since when that was live."""
    switch: bool
    reason: str
    """One of REASONS."""
    text: str
    """The same for people, one sentence."""
    window_s: float
    """How long the window was; `rates` remember earlier ones too."""
    rates: dict[str, float]
    """policy -> hit rate that was compared."""
    window_rates: dict[str, float]
    """policy -> hit rate in this window alone."""
    advantage: float
    """Rate of the best other policy, less the live one's; negative when the live one is the best."""
    margin: float
    """What the advantage must exceed."""
    residual: float | None
    """Shadow of the live policy less the engine's own hit rate; None while it cannot be known."""
    requests: int
    """Counted requests of the window."""
    blocks: int
    """Full blocks that they looked up."""
    sample: float = 1.0
    """Share of the blocks that the shadows follow."""
    preset: str = "default"
    details: dict[str, float] = field(default_factory=dict)
    """What else a preset says: `capacity` of the paper's replay."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(self.as_dict(), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Decision":
        """Return the decision that `as_dict` gave; ValueError when it is none."""
        try:
            made = cls(**{name.name: values[name.name] for name in fields(cls)})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a decision: {error}") from error
        texts: tuple[str, ...] = (made.policy, made.live, made.reason, made.text, made.preset)
        numbers = [
            made.t,
            made.since,
            made.window_s,
            made.advantage,
            made.margin,
            made.requests,
            made.blocks,
            made.sample,
        ]
        numbers += [] if made.residual is None else [made.residual]
        for rates in (made.rates, made.window_rates, made.details):
            if not isinstance(rates, dict):
                raise ValueError("not a decision: rates are no object")
            texts += tuple(rates)
            numbers += rates.values()
        if (
            type(made.switch) is not bool
            or not all(isinstance(text, str) for text in texts)
            or not all(type(number) in {int, float} for number in numbers)
            or made.reason not in REASONS
        ):
            raise ValueError("not a decision: a field has the wrong type")
        return made


def percent(rate: float) -> str:
    """Return a rate as people read it."""
    return f"{100 * rate:.2f} %"


def points(difference: float) -> str:
    """Return a difference of rates as people read it."""
    return f"{100 * difference:+.2f} points"
