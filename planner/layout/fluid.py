"""Layouts by an integer programme in which load flows like a fluid, solved with SCIP: candidates for the simulation.

A session takes P(n) seconds of prefill on a replica of degree n, and D(n) seconds of a full decode batch. Every second
of a replica is used. Decode replicas also prefill, as the online routing lets them. Without prefill replicas the layout
is co-located. There are x(n) prefill and y(n) decode replicas. The session rates are r(n) of remote prefill, l(n) of
local prefill and d(n) of decode:

    r(n) P(n) + a(n) A(n) <= x(n),   l(n) P(n) + b(n) A(n) + d(n) D(n) <= y(n),   b(n) <= d(n)
    sum r(n) + l(n) = sum d(n) = rate,   sum n (x(n) + y(n)) <= GPUs
    sum y(n) kv(n) >= rate * KV of a session's running rounds (token seconds)
    sum y(n) kept(n) >= (rate - sum (a(n) + b(n))) * KV of a session with its tools (token seconds)

`kept` is the KV memory, or the KV store where there is one. The last line says: of a(n) + b(n) sessions per second, no
KV is kept between their rounds, and computing it again takes A(n) seconds of a replica.

The rate is maximised. If an idle replica of a degree misses the target of a phase in too many rounds, the degree gets
nothing of that phase. Queues are left out. So the rate is an upper bound, and only a simulation can tell how much of it
a layout carries. `Costs.with_queues` gives a better guess of that rate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from math import exp, sqrt
from typing import Any

from pyscipopt import Model, quicksum

from ampd.perf.piecewise import PiecewiseModel
from ampd.types import Parallelism
from planner.layout.layout import Layout, PlanCase, replicas_of
from workloads.trace import Session

_SPREAD = 1.645
"""Memory is planned for the 95th percentile of the resident sessions, a Poisson variable."""
_UNLIMITED_TOKENS = 1 << 40
_SESSIONS = 100
"""Most sessions of the trace from which costs are computed."""
_DECODE_SHARE = 0.9
"""The share of a full decode batch that replicas can keep up, because load is uneven over time and replicas."""
_LEAST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Costs:
    """The time and the memory that a session takes.

    Attributes:
        prefill_s, decode_s: degree -> seconds of a replica for one session. Degrees that cannot keep a target are
            missing.
        memories: (tokens of a replica by degree, token seconds of a session), for each kind of memory that limits the
            rate, because running rounds need it.
        usable: degree -> the share of a replica's time that prefills can use.
        resident: the same for the memory that keeps the KV of sessions between their rounds; None: it is not limited.
        again_s: degree -> seconds of a replica to compute again what a session loses if its KV is never kept. Degrees
            that would miss the TTFT target are missing.
    """

    degrees: tuple[int, ...]
    prefill_s: Mapping[int, float]
    decode_s: Mapping[int, float]
    memories: Sequence[tuple[Mapping[int, float], float]]
    usable: Mapping[int, float] = field(default_factory=dict)
    resident: tuple[Mapping[int, float], float] | None = None
    again_s: Mapping[int, float] = field(default_factory=dict)

    def without_memory(self) -> Costs:
        """The costs if memory were unlimited: no layout computes more than they allow."""
        return replace(self, memories=[], resident=None)

    def with_queues(self) -> Costs:
        """The costs, with the time that replicas must stay idle. They give about the rates that simulations find."""
        prefill_s, again_s = (
            {n: seconds / self.usable.get(n, 1.0) for n, seconds in by_degree.items()}
            for by_degree in (self.prefill_s, self.again_s)
        )
        decode_s = {n: seconds / _DECODE_SHARE for n, seconds in self.decode_s.items()}
        return replace(self, prefill_s=prefill_s, decode_s=decode_s, again_s=again_s)

    def bound(self, layout: Layout) -> float:
        """About the fluid rate of a layout with unlimited memory: replicas share the work as their speeds allow."""
        prefilled = sum(count / self.prefill_s[n] for n, count in layout.prefill if n in self.prefill_s)
        owners = [*layout.decode, *layout.mixed]
        decoded = sum(count / self.decode_s[n] for n, count in owners if n in self.decode_s)
        both = sum(
            count / (self.prefill_s[n] + self.decode_s[n])
            for n, count in owners
            if n in self.prefill_s and n in self.decode_s
        )
        if not decoded or prefilled >= decoded:
            return decoded
        # Of every session, the share `remote` is prefilled elsewhere, so the owners' time goes into the rest.
        local_s = 1 / both - 1 / decoded if both else 0.0
        return (1 + prefilled * local_s) * both if both else min(prefilled, decoded)


def costs_of(case: PlanCase) -> Costs:
    """The costs of the mean session."""
    lives = case.population.lives
    sessions = even_choice([life.session for life in lives], _SESSIONS)
    stay = mean_stay(sessions, case.model)
    running = {degree: float(tokens) for degree, tokens in case.kv_capacity_tokens.items() if tokens}
    is_limited = len(running) == len(case.degrees)
    kept = {degree: float(tokens) for degree, tokens in case.kv_store_tokens.items()} or running
    model, slo = case.model, case.slo

    def in_time(hist: int, incr: int, theta: Parallelism) -> bool:
        return model.prefill_s(hist, incr, theta) <= slo.ttft_s

    def keeps_up(hist: int, incr: int, theta: Parallelism) -> bool:
        return model.decode_step_s(1, hist + incr, theta) <= slo.itl_s

    prompts = [pair for session in sessions for pair in session.prompts_tokens()]
    prefill = {
        degree: 1 / prefill_rate(sessions, model, Parallelism(degree))
        for degree in _able(case, prompts, in_time) or case.degrees
    }
    decode = {
        degree: 1 / decode_rate(sessions, model, Parallelism(degree), slo.itl_s, case.kv_capacity_tokens[degree])
        for degree in _able(case, prompts, keeps_up) or case.degrees
    }
    again = _able(case, [pair for session in sessions for pair in _whole_prompts(session)], in_time)
    usable = {degree: _usable_share(case, sessions, degree) for degree in prefill}
    return Costs(
        case.degrees,
        prefill,
        decode,
        [(running, stay.running_token_s)] if is_limited and stay.running_token_s > 0 else [],
        usable,
        (kept, stay.resident_token_s) if len(kept) == len(case.degrees) and stay.resident_token_s > 0 else None,
        {degree: again_s(sessions, model, Parallelism(degree)) for degree in again if degree in prefill},
    )


def prefill_rate(sessions: Sequence[Session], model: PiecewiseModel, theta: Parallelism) -> float:
    """Sessions per second whose prefills keep a replica busy all the time."""
    busy_s = sum(model.prefill_s(*pair, theta) for session in sessions for pair in session.computed_tokens())
    return len(sessions) / busy_s


def again_s(sessions: Sequence[Session], model: PiecewiseModel, theta: Parallelism) -> float:
    """Seconds of a replica that the mean session takes more if each round computes its whole prompt.

    A prefix that sessions share stays.
    """
    whole_s = sum(model.prefill_s(*pair, theta) for session in sessions for pair in _whole_prompts(session))
    return max(whole_s / len(sessions) - 1 / prefill_rate(sessions, model, theta), 0.0)


def decode_rate(
    sessions: Sequence[Session], model: PiecewiseModel, theta: Parallelism, itl_s: float, kv_capacity_tokens: int
) -> float:
    """Sessions per second that keep the largest batch of a replica full all the time."""
    prompts = [pair for session in sessions for pair in session.computed_tokens()]
    rounds = [item for session in sessions for item in session.rounds]
    tokens = sum(item.output_tokens for item in rounds)
    context = sum(sum(pair) * item.output_tokens for pair, item in zip(prompts, rounds, strict=True))
    tokens_per_s = _batch_throughput(model, theta, itl_s, kv_capacity_tokens, context / tokens)
    return len(sessions) * tokens_per_s / tokens


def _batch_throughput(
    model: PiecewiseModel, theta: Parallelism, itl_s: float, kv_capacity_tokens: int, context_tokens: float
) -> float:
    """Tokens per second of the largest batch that fits the memory and keeps the ITL target.

    If a single sequence misses half the target, the limit is twice the time of its step.
    """
    limit_s = max(itl_s, 2 * model.decode_step_s(1, int(context_tokens), theta))
    most = kv_capacity_tokens / context_tokens if kv_capacity_tokens else 4096
    batch = 1
    while batch * 2 <= most and model.decode_step_s(batch * 2, int(2 * batch * context_tokens), theta) <= limit_s:
        batch *= 2
    return batch / model.decode_step_s(batch, int(batch * context_tokens), theta)


def _usable_share(case: PlanCase, sessions: Sequence[Session], degree: int) -> float:
    """The highest utilisation at which the wanted share of prefills is still on time.

    In a single queue, about `u exp(-2 (1 - u) t E[S] / E[S^2])` of the prefills wait longer than t at utilisation u.
    """
    prompts = [pair for session in sessions for pair in session.computed_tokens()]
    seconds = [case.model.prefill_s(hist, incr, Parallelism(degree)) for hist, incr in prompts]
    mean_s = sum(seconds) / len(seconds)
    waits = max(case.slo.ttft_s - mean_s, 0.0) * sum(seconds) / sum(each * each for each in seconds)
    allowed = max(1 - case.attainment, 0.01)
    low, high = _LEAST_SHARE, 1.0
    while high - low > 0.01:
        middle = (low + high) / 2
        if middle * exp(-2 * (1 - middle) * waits) <= allowed:
            low = middle
        else:
            high = middle
    return low


def _able(
    case: PlanCase, prompts: Sequence[tuple[int, int]], met: Callable[[int, int, Parallelism], bool]
) -> list[int]:
    """The degrees of which an idle replica meets a target in enough rounds.

    Args:
        prompts: (history, increment) of the rounds.
        met: whether a round meets the target.
    """

    def share(degree: int) -> float:
        return sum(met(*prompt, Parallelism(degree)) for prompt in prompts) / len(prompts)

    return [degree for degree in case.degrees if share(degree) >= case.attainment]


def _whole_prompts(session: Session) -> list[tuple[int, int]]:
    """(what stays, what is computed) of every round's prompt, if no KV is kept but a prefix that sessions share."""
    prompts = zip(session.computed_tokens(), session.shared_tokens(), strict=True)
    return [((there := min(shared, hist)), hist + incr - there) for (hist, incr), shared in prompts]


def even_choice(sessions: Sequence[Session], count: int) -> tuple[Session, ...]:
    """`count` sessions, spread evenly over the trace."""
    if len(sessions) <= count:
        return tuple(sessions)
    return tuple(sessions[index * len(sessions) // count] for index in range(count))


# -- the KV that the sessions of a case need at the same time


@dataclass(frozen=True, slots=True)
class Demand:
    """The load that the layout must carry.

    Attributes:
        rate: sessions per second.
        resident_kv_tokens: KV of all sessions that are in the cluster at the same time.
        running_kv_tokens: KV of the sessions whose rounds run.
    """

    rate: float
    resident_kv_tokens: float = 0.0
    running_kv_tokens: float = 0.0


def demand_of(case: PlanCase) -> Demand:
    """The rate, and the 95th percentiles of the resident and of the running KV for sessions of mean size."""
    stay = mean_stay(case.sessions, case.model)
    return Demand(
        case.rate,
        _kv_tokens(case.rate, stay.lifetime_s, stay.resident_token_s),
        _kv_tokens(case.rate, stay.running_s, stay.running_token_s),
    )


def _kv_tokens(rate: float, seconds: float, token_s: float) -> float:
    """The 95th percentile of the KV that sessions need at the same time, from how long one needs it on average."""
    return rate * token_s * (1 + _SPREAD / sqrt(rate * seconds))


def memory_needs(
    kv_tokens: Mapping[int, float], store_tokens: Mapping[int, float], demand: Demand
) -> list[tuple[Mapping[int, float], float]]:
    """(tokens of a replica by degree, tokens that the decode replicas need together), for each kind of memory.

    With a store, KV memory holds the running rounds and host memory the resident sessions. Without one, KV memory
    holds them all.

    Args:
        kv_tokens: degree -> KV memory of a replica. 0: unlimited.
        store_tokens: degree -> host memory of a replica's KV store; empty: replicas have no stores.
    """
    memory = {degree: float(tokens or _UNLIMITED_TOKENS) for degree, tokens in kv_tokens.items()}
    if not store_tokens:
        return [(memory, demand.resident_kv_tokens)]
    return [(memory, demand.running_kv_tokens), (store_tokens, demand.resident_kv_tokens)]


@dataclass(frozen=True, slots=True)
class Stay:
    """A session in an idle cluster of the largest degree, or the mean of several.

    Attributes:
        lifetime_s: from its first request to its last token, tools included. running_s: the same without tools.
        resident_token_s, running_token_s: the session's tokens of KV times the seconds that they stay, for the two
            times above. Multiplied by the session rate, they give the mean KV of all sessions in the cluster. A prefix
            that the session shares with others does not count.
    """

    lifetime_s: float
    running_s: float
    resident_token_s: float
    running_token_s: float


def mean_stay(sessions: Sequence[Session], model: PiecewiseModel) -> Stay:
    stays = [_stay(session, model) for session in sessions]
    columns = zip(*(astuple(stay) for stay in stays), strict=True)
    return Stay(*(sum(column) / len(stays) for column in columns))


def _stay(session: Session, model: PiecewiseModel) -> Stay:
    """The stay of one session. Its KV stays until its next round begins."""
    theta = max(model.parallelisms, key=lambda theta: theta.tp)
    lifetime_s = running_s = resident_token_s = running_token_s = 0.0
    rounds = zip(session.computed_tokens(), session.shared_tokens(), session.rounds, strict=True)
    for index, ((hist, incr), shared, item) in enumerate(rounds):
        context = hist + incr
        own_tokens = context - shared + item.output_tokens
        seconds = model.prefill_s(hist, incr, theta)
        seconds += item.output_tokens * model.decode_step_s(1, context, theta)
        running_s += seconds
        running_token_s += seconds * own_tokens
        if index + 1 < len(session.rounds):
            seconds += session.rounds[index + 1].tool_s
        lifetime_s += seconds
        resident_token_s += seconds * own_tokens
    return Stay(lifetime_s, running_s, resident_token_s, running_token_s)


# -- the programme, solved with SCIP

_BEST_OF_ALL = 3
_WORTH_A_TRIAL = 0.45
"""A proposal whose bound is below this share of the best one is left out."""


def most_rate(
    costs: Costs,
    gpus: int,
    prefill: Collection[int] | None = None,
    decode: Collection[int] | None = None,
    excluded: Sequence[Layout] = (),
    *,
    has_local: bool = True,
) -> tuple[Layout, float] | None:
    """The layout with the highest rate, and its rate; None: no layout fits.

    Args:
        prefill, decode: the degrees to use; None: all. No prefill degree: a co-located layout.
        excluded: layouts that were found before.
        has_local: decode replicas prefill too. Otherwise the programme balances the two phases.
    """
    return _Programme(costs, gpus, prefill, decode, excluded, has_local).most_rate()


def fewest_gpus(costs: Costs, gpus: int, rate: float) -> int | None:
    """The fewest GPUs that a rate needs; None: the given GPUs are too few."""
    return _Programme(costs, gpus, None, None, (), has_local=True).fewest_gpus(rate)


def proposals(costs: Costs, gpus: int) -> list[Layout]:
    """Different layouts for the simulation to choose from, the most promising first.

    The best co-located layout of each degree, the best split of each pair of degrees, and the best of all.
    """
    if gpus < min(costs.degrees):
        return []
    found: dict[Layout, float] = {}
    for prefill, decode in _combinations(costs, gpus):
        # Splits that only local prefills make equal are many. The balanced one is another good guess.
        for has_local in (True, False) if prefill else (True,):
            if (solution := most_rate(costs, gpus, prefill, decode, has_local=has_local)) is not None:
                found.setdefault(*solution)
    best: list[Layout] = []
    while len(best) < _BEST_OF_ALL and (solution := most_rate(costs, gpus, excluded=best)) is not None:
        best.append(solution[0])
        found.setdefault(*solution)
    highest = max(found.values(), default=0.0)
    promising = [layout for layout, rate in found.items() if rate >= _WORTH_A_TRIAL * highest]
    return sorted(promising, key=lambda layout: -found[layout])


def _combinations(costs: Costs, gpus: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for decode in costs.decode_s:
        if decode in costs.prefill_s:
            yield (), (decode,)
        for prefill in costs.prefill_s:
            if prefill + decode <= gpus:
                yield (prefill,), (decode,)


class _Programme:
    """One programme with its variables. Rates are in units of what one replica can do at most.

    SCIP's tolerances are absolute, so its numbers must be near 1.
    """

    def __init__(
        self,
        costs: Costs,
        gpus: int,
        prefill: Collection[int] | None,
        decode: Collection[int] | None,
        excluded: Sequence[Layout],
        has_local: bool,
    ) -> None:
        self._model = model = Model()
        model.hideOutput()
        model.setParam("parallel/maxnthreads", 1)
        self._x = self._replicas("prefill", gpus, costs.prefill_s, prefill)
        self._y = self._replicas("decode", gpus, costs.decode_s, decode)
        self._unit = 1 / min((*costs.prefill_s.values(), *costs.decode_s.values()))
        self._rate = model.addVar(lb=0.0, name="rate")
        self._gpus = quicksum(n * count for counts in (self._x, self._y) for n, count in counts.items())
        model.addCons(self._gpus <= gpus)
        model.addCons(quicksum(self._y.values()) >= 1)
        if prefill:
            model.addCons(quicksum(self._x.values()) >= 1)
        self._flow(costs, has_local)
        for tokens, token_s in costs.memories:
            model.addCons(self._held(tokens, token_s) >= self._rate)
        for layout in excluded:
            exclude(model, self._x, self._y, layout, gpus)

    def most_rate(self) -> tuple[Layout, float] | None:
        self._model.setObjective(self._rate, "maximize")
        if not solved(self._model):
            return None
        x, y = ({n: round(self._model.getVal(v)) for n, v in counts.items()} for counts in (self._x, self._y))
        return Layout(replicas_of(x), replicas_of(y)), self._model.getVal(self._rate) * self._unit

    def fewest_gpus(self, rate: float) -> int | None:
        self._model.addCons(self._rate >= rate / self._unit)
        self._model.setObjective(self._gpus, "minimize")
        return round(self._model.getObjVal()) if solved(self._model) else None

    def _replicas(
        self, name: str, gpus: int, able: Mapping[int, float], wanted: Collection[int] | None
    ) -> dict[int, Any]:
        return {
            n: self._model.addVar(vtype="I", lb=0, ub=gpus // n, name=f"{name}{n}")
            for n in able
            if wanted is None or n in wanted
        }

    def _flow(self, costs: Costs, has_local: bool) -> None:
        """The session rates of each phase, and the seconds that they take."""
        model, prefill_s, decode_s = self._model, costs.prefill_s, costs.decode_s
        prefilled, decoded, again = [], [], []
        again_s = costs.again_s if costs.resident is not None else {}
        for n, count in self._x.items():
            remote = model.addVar(lb=0.0)
            used = remote * (prefill_s[n] * self._unit)
            prefilled.append(remote)
            if n in again_s:
                again.append(model.addVar(lb=0.0))
                used += again[-1] * (again_s[n] * self._unit)
            model.addCons(used <= count)
        for n, count in self._y.items():
            decode = model.addVar(lb=0.0)
            used = decode * (decode_s[n] * self._unit)
            decoded.append(decode)
            if has_local and n in prefill_s:
                local = model.addVar(lb=0.0)
                model.addCons(local <= decode)
                used += local * (prefill_s[n] * self._unit)
                prefilled.append(local)
                if n in again_s:
                    again.append(model.addVar(lb=0.0))
                    model.addCons(again[-1] <= decode)
                    used += again[-1] * (again_s[n] * self._unit)
            model.addCons(used <= count)
        model.addCons(quicksum(prefilled) >= self._rate)
        model.addCons(quicksum(decoded) >= self._rate)
        if costs.resident is not None:
            model.addCons(self._held(*costs.resident) + quicksum(again) >= self._rate)

    def _held(self, tokens: Mapping[int, float], token_s: float) -> Any:
        """The rate whose KV the decode replicas hold."""
        return quicksum(tokens[n] / (token_s * self._unit) * count for n, count in self._y.items())


def exclude(model: Any, x: Mapping[int, Any], y: Mapping[int, Any], layout: Layout, gpus: int) -> None:
    """A no-good cut: at least one number of replicas must be larger or smaller than in this layout."""
    differs = []
    for variables, replicas in ((x, dict(layout.prefill)), (y, dict(layout.decode))):
        for degree, variable in variables.items():
            most, value = gpus // degree, replicas.get(degree, 0)
            more, fewer = model.addVar(vtype="B"), model.addVar(vtype="B")
            model.addCons(variable >= (value + 1) * more)
            model.addCons(variable <= most - (most - value + 1) * fewer)
            differs += [more, fewer]
    model.addCons(quicksum(differs) >= 1)


def solved(model: Any) -> bool:
    """Solve, and whether there is a solution."""
    model.optimize()
    status: str = model.getStatus()
    if status == "infeasible":
        return False
    if status == "userinterrupt":
        raise KeyboardInterrupt
    if status != "optimal":
        raise RuntimeError(f"SCIP ended with the status {status}")
    return True
