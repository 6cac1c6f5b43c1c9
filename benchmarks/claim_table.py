"""The papers' claims as a table: for each one the trainings that it needs, what they are asked, and which differences
decide. `benchmarks.claims` runs it.

Every training is a config of jobs/configs with settings over it. Its world, questions, model and sampling come from the
seed, so two trainings of one seed differ only in what their settings say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mempipe.data.world import EvidenceOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A run of `mempipe train`. `begins` is the model that it starts from, TRAINING/warm_start or TRAINING/huggingface;
    empty: a new one. Unless its settings say otherwise it imitates the demonstrations of its config first."""

    config: str
    settings: Sequence[str] = ()
    begins: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of an evaluation: a model, and the training whose agent plays it (empty: the model's own)."""

    model: str
    agent: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    control: str = ""
    """As in an evaluation: no_memory."""

    @property
    def trainings(self) -> list[str]:
        return list(dict.fromkeys(filter(None, (self.model.partition("/")[0], self.agent))))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """Questions about the held-out worlds of a seed, or the `file` in the folder of a training. Of a file all questions
    are asked; with `most` at most that number, each joined from `objectives` of its questions."""

    hops: Sequence[int] = (1, 2, 3)
    passages: int = 4
    order: EvidenceOrder = "reading"
    objectives: int = 1
    file: str = ""
    most: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The exact match of `row` less that of `other`, as a mean over `sets` (empty: all sets of the claim). It holds
    when the interval over trainings lies above -margin."""

    row: str
    other: str
    sets: Sequence[str] = ()
    margin: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """`decides` are the differences that the verdict rests on, all of which must hold; `also` are reported with them.
    A claim that another `command` measures has no rows."""

    title: str
    paper: str
    """What the paper says, with its figure."""
    outcome: str
    """The primary outcome."""
    prediction: str
    """What is expected, written down before the runs."""
    rows: Sequence[str] = ()
    sets: Sequence[str] = ()
    decides: Sequence[Difference] = ()
    also: Sequence[Difference] = ()
    seeds: Sequence[int] = (1, 2, 3)
    command: Sequence[str] = ()


NO_START = "warm_start=null"
REJECTION = (NO_START, "algorithm.advantage=rejection", "algorithm.kl_coef=0.0")
CLEAN = "warm_start.num_noisy_trajectories=0"
TIGHT = ("world.evidence_order=random", "budget.memory_tokens=32", "budget.memory_message_tokens=36")
"""A memory that must choose. A fact takes 4 tokens and the word before all facts 1, so 32 tokens hold 7 facts. A
document of 4 passages, as in training, has 8 facts or more, so noting everything never fits, at any length. A reader
that keeps the facts that the question may still need holds at most 3 at once in documents of 4 passages, 6 in those of
8, and 7 in 98 of 100 of those of 16: a longer document does not overflow a memory that chooses."""
FAR = ("world.hops=[1, 3, 6, 9]", "budget.max_turns=12", "budget.context_tokens=1024")
"""Questions of up to 9 hops: a chain of 10 hops without a repeated relation does not exist in the world."""
PAIRS = ("world.objectives=2", "budget.max_turns=7")
"""Two questions asked as one, as in table 2 of arXiv 2606.03197. Up to 6 facts are needed for them, and memories of 32
tokens hold as many."""
GRID = {
    "low": ("optimizer.lr=2.5e-4",),
    "middle": (),
    "high": ("optimizer.lr=1.0e-3",),
    "long": ("num_steps=60",),
}
"""The baseline is tuned over this grid, and the claim must hold against each of its trainings."""
BUDGETS = (4, 6, 8, 12, 16, 32)
GAP_BUDGETS = (24, 48)
"""Smaller memories than the 96 tokens of the training. The script's notes of a pair take 32 tokens in the median, more
than 24 for 92 % of the pairs, more than 48 for 7 %."""
FULL_HISTORY = (
    "agent={name: react}",
    "budget={question_tokens: 256, action_tokens: 96, observation_tokens: 224, max_turns: 6, context_tokens: 2048}",
)
MEASURED_LATER = ("evaluation.untrained=false", "evaluation.num_questions=50")
"""A training of SmolLM2 evaluates for half an hour, and the claim asks its own questions afterwards."""
FOUR_GAPS: Mapping[str, Any] = {"budget": {"question_tokens": 512, "max_turns": 10, "context_tokens": 2048}}
"""Four gaps need four searches and an answer, and twice the question."""

TRAININGS: dict[str, Training] = {
    "quickstart": Training(config="quickstart"),
    "clean": Training(config="quickstart", settings=("warm_start.num_clean_trajectories=5500", CLEAN)),
    "rejection": Training(config="quickstart", settings=REJECTION, begins="quickstart/warm_start"),
    "published-reward": Training(
        config="quickstart",
        settings=(NO_START, "algorithm.advantage=grpo", "reward.wrong_answer=0.1"),
        begins="quickstart/warm_start",
    ),
    "react": Training(config="quickstart_react"),
    "mem1": Training(config="quickstart_mem1"),
    "far": Training(config="quickstart", settings=FAR),
    **{
        f"react-{size}-{name}": Training(config="quickstart_react", settings=(*FAR, *layers, *settings))
        for size, layers in {"same": (), "double": ("world.num_layers=9",)}.items()
        for name, settings in GRID.items()
    },
    # One warm start for all that follows; its run needs one step.
    "reader": Training(config="tiny_memtrain", settings=(*TIGHT, "num_steps=1")),
    **{
        f"pretext{name}": Training(
            config="tiny_memtrain", settings=(NO_START, *TIGHT, "world.hops=[1]", *settings), begins="reader/warm_start"
        )
        for name, settings in {
            "": (),
            "-decoupled": ("reward.recall_weight=0",),
            "-end-to-end": ("agent.num_recalls=0",),
        }.items()
    },
    **{
        name: Training(
            config="quickstart_memagent", settings=(NO_START, *TIGHT, "world.hops=[1, 2]", *settings), begins=begins
        )
        for name, begins, settings in (
            ("full", "pretext/huggingface", ()),
            ("decoupled", "pretext-decoupled/huggingface", ()),
            ("end-to-end", "pretext-end-to-end/huggingface", ()),
            ("alone", "reader/warm_start", ()),
            ("continued", "reader/warm_start", ("num_steps=60",)),
        )
    },
    **{
        f"{agent}-{name}": Training(config=config, settings=(*PAIRS, *settings), begins=begins)
        for agent, (config, settings) in {
            "memsearcher": ("quickstart", ("budget.memory_tokens=32", "budget.memory_message_tokens=36")),
            "mem1": ("quickstart_mem1", ()),
        }.items()
        for name, begins in {"after": "pretext/huggingface", "alone": "reader/warm_start"}.items()
    },
    "smollm2": Training(config="smollm2_cloze_search"),
    "smollm2-clean": Training(
        config="smollm2_cloze_search",
        settings=("warm_start.num_clean_trajectories=210", CLEAN, "num_steps=1"),
    ),
    **{
        name: Training(config="smollm2_two_gaps", settings=(*settings, *MEASURED_LATER), begins=begins)
        for name, settings, begins in (
            ("two-gaps", (), ""),
            ("two-gaps-clean", ("warm_start.num_clean_trajectories=600", CLEAN, "num_steps=1"), ""),
            ("two-gaps-rejection", (*REJECTION, 'model.source=""'), "two-gaps/warm_start"),
            ("two-gaps-react", FULL_HISTORY, ""),
        )
    },
}

ROWS: dict[str, Row] = {
    **{
        name: Row(model=f"{name}/huggingface")
        for name in TRAININGS
        if not name.startswith(("reader", "pretext", "smollm2-", "two-gaps"))
    },
    "start": Row(model="quickstart/warm_start", agent="quickstart"),
    "clean-start": Row(model="clean/warm_start", agent="clean"),
    **{
        f"memory-{tokens}": Row(
            model="quickstart/huggingface", agent="quickstart", settings={"budget": {"memory_tokens": tokens}}
        )
        for tokens in BUDGETS
    },
    "reader-start": Row(model="reader/warm_start", agent="alone"),
    "memtrain-alone": Row(model="pretext/huggingface", agent="alone"),
    "smollm2-start": Row(model="smollm2/warm_start", agent="smollm2"),
    "smollm2-clean-start": Row(model="smollm2-clean/warm_start", agent="smollm2"),
    **{
        name: Row(model=f"{name}/huggingface", settings=FOUR_GAPS)
        for name in ("two-gaps", "two-gaps-rejection", "two-gaps-react")
    },
    "two-gaps-start": Row(model="two-gaps/warm_start", agent="two-gaps", settings=FOUR_GAPS),
    "two-gaps-clean-start": Row(model="two-gaps-clean/warm_start", agent="two-gaps", settings=FOUR_GAPS),
    "two-gaps-no-memory": Row(model="two-gaps/huggingface", agent="two-gaps", settings=FOUR_GAPS, control="no_memory"),
    **{
        f"two-gaps-{tokens}": Row(
            model="two-gaps/huggingface",
            agent="two-gaps",
            settings={"budget": {**FOUR_GAPS["budget"], "memory_tokens": tokens}},
        )
        for tokens in GAP_BUDGETS
    },
}

LENGTHS = (4, 8, 16)
"""Passages in a document: as in training, twice and four times as many."""
REVERSE, READING = ([f"{order}-{length}" for length in LENGTHS] for order in ("reverse", "reading"))
LONGER = [f"{order}-{length}" for order in ("reverse", "reading") for length in LENGTHS[1:]]
FAR_HOPS = (1, 3, 6, 9)
SETS: dict[str, QuestionSet] = {
    "world": QuestionSet(),
    "pairs": QuestionSet(objectives=2),
    **{f"hops-{hops}": QuestionSet(hops=[hops]) for hops in FAR_HOPS},
    **{
        f"{order}-{length}": QuestionSet(hops=[2], passages=length, order=order)
        for order in ("reverse", "reading")
        for length in LENGTHS
    },
    "gaps": QuestionSet(file="smollm2/questions/test.parquet"),
    **{
        f"gaps-{number}": QuestionSet(file="two-gaps/questions/single/test.parquet", objectives=number, most=300)
        for number in (1, 2, 3, 4)
    },
}
GAPS = [f"gaps-{number}" for number in (1, 2, 3, 4)]
MANY = (1, 2, 3, 4)

CLAIMS: dict[int, Claim] = {
    1: Claim(
        title="Reinforcement learning lifts an imitating memory agent",
        paper="MemSearcher: Qwen2.5-3B rises from 14.4 to 43.8 exact match, average of seven sets.",
        outcome="Exact match after GRPO less that of its start, for the quickstart's start and for a faultless one.",
        prediction="Above .70 for the quickstart's start, above 0 for the faultless one.",
        rows=("start", "quickstart", "clean-start", "clean", "rejection", "published-reward"),
        sets=("world",),
        decides=(Difference(row="quickstart", other="start"), Difference(row="clean", other="clean-start")),
        also=(
            Difference(row="quickstart", other="clean-start"),
            Difference(row="quickstart", other="rejection"),
            Difference(row="quickstart", other="published-reward"),
        ),
    ),
    2: Claim(
        title="The tokens of a turn do not grow with the turns",
        paper="MemSearcher: the context stays nearly constant over the turns, that of ReAct grows.",
        outcome="Tokens of the context in turn 20, divided by those in turn 5.",
        prediction="About 1 for the agents with a memory, about 4 for ReAct.",
        command=("-m", "benchmarks.context_growth"),
    ),
    3: Claim(
        title="A small model with a memory beats a larger one without",
        paper="MemSearcher: the 3B model is above the 7B baselines.",
        outcome="Exact match of MemSearcher less that of ReAct with twice the parameters, over 1, 3, 6 and 9 hops.",
        prediction="Above 0 on the mean, through 6 and 9 hops; no difference at 1 hop.",
        rows=("far", *(f"react-{size}-{name}" for size in ("same", "double") for name in GRID)),
        sets=[f"hops-{hops}" for hops in FAR_HOPS],
        decides=[Difference(row="far", other=f"react-double-{name}") for name in GRID],
        also=[Difference(row="far", other=f"react-same-{name}") for name in GRID],
    ),
    4: Claim(
        title="The curve of exact match over the memory budget bends",
        paper="None; this project says that beyond some budget more memory adds nothing.",
        outcome="Exact match with 16 memory tokens less that with 8; and with 16 less that with 32, which may be lower "
        "by .05.",
        prediction="The first above .20; the second within .05 of 0.",
        rows=[f"memory-{tokens}" for tokens in BUDGETS],
        sets=("world",),
        decides=(
            Difference(row="memory-16", other="memory-8"),
            Difference(row="memory-16", other="memory-32", margin=0.05),
        ),
    ),
    5: Claim(
        title="MemTrain alone lifts reading",
        paper="MemTrain: 51.2 instead of 22.0 on RULER-HQA (Qwen3-4B, average of eight lengths).",
        outcome="Exact match of MemTrain's model, played by MemAgent, less that of its start, in reverse order.",
        prediction="Above 0. The pretext asks labelled questions of one hop: this is not learning without labels.",
        rows=("reader-start", "memtrain-alone"),
        sets=(*REVERSE, *READING),
        decides=(Difference(row="memtrain-alone", other="reader-start", sets=REVERSE),),
        also=(Difference(row="memtrain-alone", other="reader-start", sets=READING),),
        seeds=MANY,
    ),
    6: Claim(
        title="MemTrain before MemAgent is better than MemAgent alone",
        paper="MemTrain: 70.3 instead of 65.1 (same setting).",
        outcome="Exact match after MemAgent less that of MemAgent alone for the same steps, in reverse order.",
        prediction="Above 0, and larger in reverse order than in reading order.",
        rows=("full", "alone"),
        sets=(*REVERSE, *READING),
        decides=(Difference(row="full", other="alone", sets=REVERSE),),
        also=(Difference(row="full", other="alone", sets=READING),),
        seeds=MANY,
    ),
    7: Claim(
        title="Recalls help: full training is better than end-to-end only",
        paper="MemTrain: after MemAgent 70.3 for full and 63.3 for end-to-end only, which is below MemAgent alone.",
        outcome="Exact match after MemAgent, full less end-to-end only, in reverse order.",
        prediction="Above 0, and larger in reverse order than in reading order. Where decoupled lies is open.",
        rows=("full", "decoupled", "end-to-end", "alone"),
        sets=(*REVERSE, *READING),
        decides=(Difference(row="full", other="end-to-end", sets=REVERSE),),
        also=(
            Difference(row="full", other="end-to-end", sets=READING),
            Difference(row="full", other="decoupled", sets=REVERSE),
            Difference(row="decoupled", other="end-to-end", sets=REVERSE),
            Difference(row="end-to-end", other="alone", sets=REVERSE),
        ),
        seeds=MANY,
    ),
    8: Claim(
        title="MemTrain lifts MemSearcher and MEM1",
        paper="MemTrain: MEM1 rises from 21.5 to 32.1 exact match with it (Qwen3-4B, average of seven sets).",
        outcome="Exact match of MemSearcher and of MEM1 after MemTrain less those without it. Two questions are asked "
        "as one, as in the paper's table, and a pair scores the mean over them.",
        prediction="Open: both begin with the same demonstrations of searching, which may hide what MemTrain taught.",
        rows=("memsearcher-after", "memsearcher-alone", "mem1-after", "mem1-alone"),
        sets=("pairs",),
        decides=(
            Difference(row="memsearcher-after", other="memsearcher-alone"),
            Difference(row="mem1-after", other="mem1-alone"),
        ),
    ),
    9: Claim(
        title="The gain holds at lengths that were not trained",
        paper="MemTrain: 62.5 instead of 57.0 at 6,400 documents, far beyond the trained length.",
        outcome="Exact match after MemAgent less that of MemAgent alone, mean over 8 and 16 passages and both orders.",
        prediction="Above 0.",
        rows=("full", "alone"),
        sets=(*REVERSE, *READING),
        decides=(Difference(row="full", other="alone", sets=LONGER),),
        seeds=MANY,
    ),
    10: Claim(
        title="More post-training does not replace MemTrain",
        paper="MemTrain: with up to 300 more steps MemAgent alone stays at least 2.6 points below.",
        outcome="Exact match after both less that of MemAgent alone for the steps of both, in reverse order.",
        prediction="Above 0, and smaller than the difference of claim 6.",
        rows=("full", "continued"),
        sets=(*REVERSE, *READING),
        decides=(Difference(row="full", other="continued", sets=REVERSE),),
        also=(Difference(row="full", other="continued", sets=READING),),
        seeds=MANY,
    ),
    11: Claim(
        title="A pretrained model learns with a memory on real text",
        paper="MemSearcher: Qwen2.5-3B learns to search Wikipedia.",
        outcome="Exact match of SmolLM2-135M after GRPO less that of its supervised start.",
        prediction="Above .15.",
        rows=("smollm2-start", "smollm2", "smollm2-clean-start"),
        sets=("gaps",),
        decides=(Difference(row="smollm2", other="smollm2-start"),),
        also=(Difference(row="smollm2", other="smollm2-clean-start"),),
        seeds=(1, 2),
    ),
    12: Claim(
        title="A memory beats a full history with the same model",
        paper="MemSearcher: 11 % (3B) and 12 % (7B) above strong baselines with the same model, relative, average of "
        "seven sets.",
        outcome="Exact match of MemSearcher less that of ReAct, with the same size and settings, through 1 to 3 hops.",
        prediction="Open: two pairs of single trainings contradicted each other.",
        rows=("quickstart", "react", "mem1"),
        sets=("world",),
        decides=(Difference(row="quickstart", other="react"),),
        also=(Difference(row="mem1", other="react"), Difference(row="quickstart", other="mem1")),
    ),
    13: Claim(
        title="On real text, several questions at once need a memory",
        paper="MemTrain: two questions at once, without a figure for the memory's part. MEM1 trains with two and tests "
        "with up to 16.",
        outcome="Exact match of SmolLM2-135M, trained with two gaps at once, on one to four: with its memory less that "
        "with an emptied one, and less that with 24 tokens, on two to four gaps.",
        prediction="Both above 0. A memory of 48 tokens is as good on two gaps, and worse on four. The full history is "
        "ahead, since four passages fit its context.",
        rows=(
            "two-gaps",
            "two-gaps-start",
            "two-gaps-clean-start",
            "two-gaps-rejection",
            "two-gaps-react",
            "two-gaps-no-memory",
            *(f"two-gaps-{tokens}" for tokens in GAP_BUDGETS),
        ),
        sets=GAPS,
        decides=(
            Difference(row="two-gaps", other="two-gaps-no-memory", sets=GAPS[1:]),
            Difference(row="two-gaps", other="two-gaps-24", sets=GAPS[1:]),
        ),
        also=(
            Difference(row="two-gaps", other="two-gaps-48", sets=GAPS[1:2]),
            Difference(row="two-gaps", other="two-gaps-48", sets=GAPS[3:]),
            *(
                Difference(row="two-gaps", other=f"two-gaps-{other}")
                for other in ("start", "clean-start", "rejection", "react")
            ),
        ),
        seeds=(1, 2),
    ),
}


def trainings_of(claim: Claim) -> list[str]:
    """Returns the trainings that a claim needs, each after the one that it begins with."""
    needed = [name for row in claim.rows for name in ROWS[row].trainings]
    ordered: list[str] = []

    def add(name: str) -> None:
        if begins := TRAININGS[name].begins:
            add(begins.partition("/")[0])
        if name not in ordered:
            ordered.append(name)

    for name in needed:
        add(name)
    return ordered
