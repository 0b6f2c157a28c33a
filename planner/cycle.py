"""One cycle of the planner: from the counts that services left in Redis to a published plan, or to the reason for none.

1. Read whether the plan is frozen, which one is published, and the counts of the newest windows.
2. Ask the engines (`planner.engines`), and build a candidate on the endpoints that are not lost.
3. Judge it against the published plan, by `planner.gate.judge` or what stands in its place.
4. Publish it, or an empty plan for Flat-LB, unless every key has the same targets already (rates alone are no reason to
   make every service build its table again).
5. Leave a record: with a publication in the same script, otherwise by itself. So a cycle that ends at any point leaves
   a plan with its record, or neither.

When somebody else published meanwhile, the cycle is done again from the start, once; the second time the conflict is
the caller's. What cannot be planned from leaves a record too, and then the published plan as it is: rates that are not
finite, a clock that went back, no endpoint that is there, a published plan of a newer schema, another salt or another
pool's endpoints. A published plan that is damaged or gone serves nobody, so it is replaced.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from planner.build import Built, build
from planner.diff import diff
from planner.engines import Engines, Seen, basis_of
from planner.gate import Judge, Memory, Observed, Situation, Verdict, judge
from planner.inputs import check_clock, check_pool, check_rates, usable, with_prefixes
from planner.predict import Economics
from planner.rates import KeyRates
from planner.record import Record, as_dict, blank, digest, dumps, resumed, took, under_version
from planner.settings import PlannerSettings
from planner.triggers import Pressure, pressure_of
from planner.windows import Windows
from service.errors import InvalidInput, InvalidPlan, PlanConflict, PlanFrozen
from service.keys import KEY_CHECK, hash_key
from service.ledger import Freeze, Ledger
from service.plan import Plan
from service.published import Ack, Head, verify

DECISIONS = {"publish": "published", "keep": "kept", "refuse": "refused", "flat": "flat"}

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Planner:
    """What one planner knows from cycle to cycle: the windows it read, the judge's memory, the plan in service."""

    def __init__(
        self,
        ledger: Ledger,
        settings: PlannerSettings,
        *,
        judge: Judge = judge,
        anew: bool = False,
        clock: Callable[[], float] = time.time,
        engines: Engines | None = None,
    ) -> None:
        """Nothing is read yet.

        anew: plan as if none were published, for a salt or names that changed on purpose.  clock: unix s, as the
        services' windows are named.  engines: in place of those that services name.
        """
        self._ledger, self._settings, self._judge, self._anew, self._clock = ledger, settings, judge, anew, clock
        self._windows = Windows(ledger, settings)
        self._engines = engines or Engines(slo_s=settings.slo_ttft_p99_s)
        self._key_check = hash_key(KEY_CHECK, settings.key_salt.encode())
        self._memory: Memory | None = None
        self._last_s = 0.0
        self._resumed, self._lost = False, tuple[str, ...]()
        self._serving = (0, 0)
        self._current: Plan | None = None
        self._pressure = Pressure()

    async def resume(self) -> tuple[str, ...]:
        """Go on from what the last planner left; return the endpoints that it found lost."""
        if not self._resumed:
            records = await self._ledger.read_cycles(limit=10)
            left = resumed(records)
            self._memory, self._last_s, self._lost = left.memory, left.at_s, left.lost
            self._engines.resume(left.engines)
            self._resumed = True
        return self._lost

    async def cycle(self, lease: str, *, trigger: str = "timer", lost: Sequence[str] = ()) -> Record:
        """Run one cycle under a lease and return its record.

        Raise what the store raises; NotLeading when the lease ended; PlanConflict when that happens twice; InvalidPlan,
        after leaving the record, for what cannot be planned from.
        """
        try:
            return await self._attempt(lease, trigger, lost)
        except PlanConflict as exc:
            log.info("plan_conflict", expected=exc.expected_version, published=exc.published_version)
            return await self._attempt(lease, trigger, lost)

    async def check(self, lost: Sequence[str] = ()) -> str:
        """Return why load or copies call for a cycle now, empty: they do not; a few ms, and what reading changes takes.

        A plan that somebody else published since is taken as it is: only what gets worse from here calls.
        """
        head = await self._ledger.read_head()
        rates, _ = await self._windows.read(self._clock())
        known = (head.epoch, head.version) == self._serving
        if not known:
            acks = await self._ledger.read_acks(fleets=True)
            self._current, self._serving = await self._published(head, acks), (head.epoch, head.version)
        pressure = await self._under(rates, lost)
        why = pressure.calls(self._pressure, self._settings.imbalance_max) if known else ""
        # What was called for once is not called for again until it is worse, or was better in between.
        self._pressure = pressure if why or not known else self._pressure.best_of(pressure)
        return why

    async def _attempt(self, lease: str, trigger: str, lost: Sequence[str]) -> Record:
        await self.resume()
        now_s = self._clock()
        record = blank(self._settings.name, now_s, trigger)
        record["lost"] = list(lost)
        head = Head()
        try:
            head = await self._ledger.read_head()
            if (frozen := await self._ledger.read_freeze()) is not None:
                return await self._leave(lease, record, head, "frozen", _words(frozen))
            return await self._plan(lease, record, head, now_s, lost)
        except (InvalidPlan, InvalidInput) as exc:
            reason = f"{exc}; the published plan stays"
            await self._leave(lease, record, head, "invalid", reason)
            cause = exc.cause if isinstance(exc, InvalidPlan) else "input"
            raise InvalidPlan(cause, reason) from exc

    async def _plan(self, lease: str, record: Record, head: Head, now_s: float, lost: Sequence[str]) -> Record:
        check_clock(now_s, self._last_s)
        began, s = time.perf_counter(), self._settings
        acks = await self._ledger.read_acks(fleets=True)
        current = await self._published(head, acks)
        rates, read = await self._windows.read(now_s)
        check_rates(rates)
        if s.tokens_per_endpoint:
            rates = with_prefixes(rates, s.prefix_tokens)
        record["keys"], record["rate_rps"] = len(rates), rates.total_rps
        record["windows"], record["events"], record["late"] = read.windows, read.events, read.late
        took(record, "read_rates", began)
        endpoints = usable(s.endpoint, acks, lost)
        record["endpoints"] = len(endpoints)
        began = time.perf_counter()
        serving = (head.epoch, head.version)
        seen = await self._engines.look(acks, endpoints, now_s, serving) if s.scrape_engines else Seen()
        took(record, "ask_engines", began)
        basis = await basis_of(s.rules, s.economics, seen, rates, endpoints)
        basis.note(record)
        decides = (read.sha256, endpoints, basis, s.limits, s.method, s.gate, head.sha256, self._memory, seen)
        record["inputs_sha256"] = digest(*decides)
        if not len(rates):
            reason = f"no service counted a request in the newest {s.windows} windows of {s.rate_window_s} s"
            return await self._leave(lease, record, head, "no_rates", reason)
        built = await asyncio.to_thread(
            build,
            rates,
            endpoints,
            rules=basis.rules,
            key_check=self._key_check,
            previous=current,
            method=s.method,
            limits=s.limits,
        )
        self._describe(record, built)
        began = time.perf_counter()
        verdict = await asyncio.to_thread(self._verdict, rates, current, built, basis.economics, seen, now_s)
        record["numbers"], record["memory"] = dict(verdict.numbers), as_dict(verdict.memory)
        record["engines"] = self._engines.as_record()
        took(record, "judge", began)
        return await self._carry_out(lease, record, head, current, built, rates, verdict)

    async def _carry_out(
        self,
        lease: str,
        record: Record,
        head: Head,
        current: Plan | None,
        built: Built,
        rates: KeyRates,
        verdict: Verdict,
    ) -> Record:
        """Rule 4 and what is remembered of it."""
        plan = built.plan if verdict.decision != "flat" else _emptied(built.plan)
        decision = DECISIONS[verdict.decision]
        same = await asyncio.to_thread(_same, current, plan)
        if same and verdict.decision in ("publish", "keep", "flat"):
            decision = "unchanged"
        if decision in ("published", "flat"):
            record["decision"], record["reason"] = decision, verdict.reason
            began = time.perf_counter()
            try:
                plan = await self._ledger.publish(
                    plan,
                    expected=head,
                    actor=self._settings.actor,
                    reason=verdict.reason,
                    lease=lease,
                    record=lambda published: dumps(under_version(record, published.version, published.epoch)),
                )
            except PlanFrozen:
                frozen = await self._ledger.read_freeze()
                return await self._leave(lease, record, head, "frozen", _words(frozen) if frozen else "frozen")
            took(record, "publish", began)
            record = under_version(record, plan.version, plan.epoch)
            self._current, self._serving = plan, (plan.epoch, plan.version)
            self._engines.begin(self._serving)
            self._last_s = record["at_s"]
        else:
            record = await self._leave(lease, record, head, decision, verdict.reason)
            self._current, self._serving = current, (head.epoch, head.version)
        self._memory = verdict.memory
        self._pressure = await self._under(rates, record["lost"])
        return record

    async def _leave(self, lease: str, record: Record, head: Head, decision: str, reason: str) -> Record:
        """Write the record of a cycle that publishes nothing."""
        record = under_version(record, head.version, head.epoch)
        record["decision"], record["reason"] = decision, reason
        if not record["memory"] and self._memory is not None:
            record["memory"] = as_dict(self._memory)
        record["engines"] = self._engines.as_record()
        await self._ledger.record(lease, dumps(record))
        self._last_s = record["at_s"]
        return record

    async def _published(self, head: Head, acks: Sequence[Ack]) -> Plan | None:
        """Return the published plan; None when there is none that a service would take."""
        if not head.version or self._anew:
            return None
        try:
            data = await self._ledger.read_plan_bytes(head.version)
            plan = await asyncio.to_thread(verify, data, head, key_check=self._key_check)
        except InvalidPlan as exc:
            if exc.cause in ("schema", "salt"):
                raise
            log.warning("published_plan_unusable", version=head.version, cause=exc.cause, message=str(exc))
            return None
        check_pool(plan, head.version, self._settings.endpoint, acks)
        return plan

    def _describe(self, record: Record, built: Built) -> None:
        record["admitted"], record["admitted_rate_share"] = built.shape.admitted, built.shape.admitted_rate_share
        record["max_over_mean"], record["outcome"] = built.shape.max_over_mean, built.outcome
        record["sha256"] = built.plan.content_sha256()
        record["durations_ms"] |= {"admit": round(built.admit_ms, 3), "place": round(built.place_ms, 3)}

    def _verdict(
        self, rates: KeyRates, current: Plan | None, built: Built, economics: Economics, seen: Seen, now_s: float
    ) -> Verdict:
        s = self._settings
        memory = self._memory or Memory(now_s)
        if not s.gate:
            return Verdict("publish", f"Published: the gate is off ({len(rates):,} keys counted).", memory=memory)
        return self._judge(
            Situation(
                rates,
                current,
                built,
                None if current is None else diff(current, built.plan),
                economics,
                Observed(now_s, built.plan.endpoints, seen.p99_s, seen.baseline_s, self._windows.active_keys(now_s)),
                self._memory,
            )
        )

    async def _under(self, rates: KeyRates, lost: Sequence[str]) -> Pressure:
        there = [name for name in self._settings.endpoint if name not in lost]
        return await asyncio.to_thread(pressure_of, rates, self._current, there, self._settings.rules)


def _same(current: Plan | None, plan: Plan) -> bool:
    return plan.assigns_as(current) if current is not None else not len(plan)


def _emptied(plan: Plan) -> Plan:
    """Return the plan without keys: every service balances."""
    return replace(
        plan,
        key_hashes=array("Q"),
        target_offsets=array("I", [0]),
        targets=array("I"),
        rates_rps=array("f"),
        parameters=replace(plan.parameters, admitted_rate_rps=0.0),
    )


def _words(frozen: Freeze) -> str:
    return f"frozen by {frozen.actor}: {frozen.reason}"
