"""Records survive Arrow and Parquet unchanged."""

import dataclasses
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mempipe.data.qa import write_questions
from mempipe.data.trajectories import (
    arrow_schema,
    groups_to_table,
    read_trajectories,
    records_to_table,
    table_to_groups,
    trajectories_schema,
    write_trajectories,
)
from mempipe.settings import ConfigError
from mempipe.types import (
    Column,
    Context,
    EndReason,
    Evidence,
    Group,
    Passage,
    Question,
    Recall,
    Search,
    TrainingSample,
    Trajectory,
)


def make_context(index: int = 0, **changes) -> Context:
    searches = [
        Search(query="q", num_passages=2, passages=[Passage(id="p", title="T", text="x\n☃", score=1 / 3)], snapshot="s")
    ]
    context = Context(
        index=index,
        token_ids=[5, 6, 7],
        loss_mask=[0, 1, 1],
        logprobs=[0.0, -0.1, -1e-17],
        policy_versions=[-1, 3, 4],
        num_prompt_tokens=1,
        num_question_tokens=1,
        num_memory_tokens=0,
        searches=searches,
        memory_after="a\x00b",
    )
    return dataclasses.replace(context, **changes)


def make_group(group_id: str = "e0-q1", **changes) -> Group:
    question = Question(
        id="q1", text="Who?", golden_answers=["A", "B"], num_hops=2, evidence=[Evidence(passage_id="p", value="v")]
    )
    trajectories = [
        Trajectory(
            id=f"{group_id}-0",
            group_id=group_id,
            member=0,
            contexts=[make_context(0), make_context(1, advantage=0.25)],
            end_reason=EndReason.ANSWERED,
            answer="A",
            reward=0.1,
        ),
        Trajectory(
            id=f"{group_id}-1", group_id=group_id, member=1, contexts=[], end_reason=EndReason.NO_ACTION, answer=None
        ),
    ]
    return dataclasses.replace(
        Group(id=group_id, question=question, trajectories=trajectories, num_retries=1, seconds=0.1), **changes
    )


def test_group_survives_a_table():
    group = make_group()
    table = groups_to_table([group])
    assert table.num_rows == 1
    (back,) = table_to_groups(table)
    assert back == group
    assert type(back.trajectories[0].end_reason) is EndReason
    assert back.trajectories[1].answer is None and back.trajectories[0].contexts[0].advantage is None


def test_tables_of_sparse_and_full_groups_have_one_schema():
    sparse = Group(id="g", question=Question(id="q", text="", golden_answers=[]), trajectories=[])
    assert records_to_table([sparse]).schema == records_to_table([make_group()]).schema == arrow_schema(Group)
    assert table_to_groups(groups_to_table([sparse, make_group()])) == [
        sparse,
        make_group(),
    ]


def test_schema_names_every_field_with_its_type():
    schema = arrow_schema(TrainingSample)
    assert schema.names == [f.name for f in dataclasses.fields(TrainingSample)]
    assert schema.field("token_ids").type == pa.list_(pa.int64())
    assert schema.field("advantage").type == pa.float64()
    assert arrow_schema(Trajectory).field("end_reason").type == pa.string()


def test_schema_of_an_unsupported_field_is_refused():
    @dataclasses.dataclass
    class Odd:
        table: bytes

    with pytest.raises(TypeError, match="bytes"):
        arrow_schema(Odd)


def test_groups_survive_a_file_in_order(tmp_path):
    groups = [make_group(f"e0-q{n}") for n in (3, 1, 2)]
    path = tmp_path / "deep" / "trajectories.parquet"
    assert write_trajectories(path, iter(groups)) == 6
    assert read_trajectories(path) == groups
    assert [p.name for p in path.parent.iterdir()] == ["trajectories.parquet"]


def test_file_has_one_row_per_trajectory_with_its_question(tmp_path):
    write_trajectories(tmp_path / "t.parquet", [make_group()])
    table = pq.read_table(tmp_path / "t.parquet")
    assert table.schema == trajectories_schema()
    assert table.select(["question_text", "group_id", "member"]).to_pylist() == [
        {"question_text": "Who?", "group_id": "e0-q1", "member": 0},
        {"question_text": "Who?", "group_id": "e0-q1", "member": 1},
    ]


def test_more_groups_than_one_row_group(tmp_path):
    groups = [make_group(f"g{n}") for n in range(150)]
    write_trajectories(tmp_path / "t.parquet", groups)
    assert pq.ParquetFile(tmp_path / "t.parquet").num_row_groups == 3
    assert read_trajectories(tmp_path / "t.parquet") == groups


def test_a_file_of_an_older_version_has_the_defaults_of_what_it_lacks(tmp_path):
    path, group = tmp_path / "t.parquet", make_group()
    write_trajectories(path, [group])
    newer = ["question_recall_targets", "question_objectives", "group_num_retries", "group_failed", "recalls"]
    pq.write_table(pq.read_table(path).drop_columns(newer), path)
    assert read_trajectories(path) == [dataclasses.replace(group, num_retries=0)]
    pq.write_table(pq.read_table(path).drop_columns(["question_text"]), path)
    with pytest.raises(ConfigError, match=r"t.parquet holds no trajectories \(.*'text'\); name a file .*, delete it"):
        read_trajectories(path)


def test_a_file_of_questions_is_not_to_be_deleted(tmp_path):
    write_questions(tmp_path / "q.parquet", [make_group().question])
    with pytest.raises(ConfigError, match=r"\); name a file that a run or an evaluation wrote, or, if this is one, "):
        read_trajectories(tmp_path / "q.parquet")


def test_no_groups_give_an_empty_file(tmp_path):
    assert write_trajectories(tmp_path / "t.parquet", []) == 0
    assert read_trajectories(tmp_path / "t.parquet") == []


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([make_group(), make_group()], "twice"),
        ([make_group(trajectories=[])], "no trajectories"),
        ([dataclasses.replace(make_group(), id="other")], "names another group"),
    ],
)
def test_groups_that_could_not_be_read_back_are_refused_and_the_old_file_stays(tmp_path, groups, message):
    path = tmp_path / "t.parquet"
    write_trajectories(path, [make_group("old")])
    with pytest.raises(ValueError, match=message):
        write_trajectories(path, groups)
    assert read_trajectories(path) == [make_group("old")]
    assert list(tmp_path.iterdir()) == [path]


def test_lone_surrogates_become_replacement_characters_in_a_file(tmp_path):
    odd = make_context(
        searches=[Search(query="a\ud800b", num_passages=1, passages=[], snapshot="s")], memory_after="fine 🙂"
    )
    trajectory = dataclasses.replace(make_group().trajectories[0], contexts=[odd])
    group = make_group(trajectories=[trajectory])
    assert table_to_groups(groups_to_table([group])) == [group]
    write_trajectories(tmp_path / "t.parquet", [group])
    ((back,),) = (each.trajectories for each in read_trajectories(tmp_path / "t.parquet"))
    assert back.contexts[0].searches[0].query == "a\ufffdb"
    assert back.contexts[0].memory_after == "fine 🙂"


def test_numbers_of_every_token_come_out_of_a_table_as_columns_of_their_own():
    group = make_group()
    tables = groups_to_table([make_group("other"), group])
    read = table_to_groups(tables.slice(1))
    assert read == [group]
    context = read[0].trajectories[0].contexts[0]
    for name in ("token_ids", "loss_mask", "logprobs", "policy_versions", "ref_logprobs"):
        column = getattr(context, name)
        assert isinstance(column, Column)
        array = np.asarray(column)
        assert array.flags.writeable  # torch warns of others
        memory = array
        while isinstance(memory, np.ndarray) and memory.base is not None:
            memory = memory.base
        assert memoryview(memory).nbytes == array.nbytes  # a view would hold on to the whole block


def test_a_column_reads_as_a_list():
    column = Column(np.array([5, 6, 7]))
    numbers = [5, 6, 7]
    assert column == numbers and numbers == column and column != [5, 6] and column == Column(np.array([5, 6, 7]))
    assert column[-1] == 7 and type(column[0]) is int and column[1:] == [6, 7] and type(column[1:]) is list
    assert list(column) == [5, 6, 7] and type(next(iter(column))) is int and column.index(6) == 1
    assert pickle.loads(pickle.dumps(column)) == column
    assert not Column(np.array([]))


def without_tokens(group: Group) -> Group:
    def bare(context: Context) -> Context:
        return dataclasses.replace(context, token_ids=[], logprobs=[], policy_versions=[], ref_logprobs=[])

    return dataclasses.replace(
        group,
        trajectories=[
            dataclasses.replace(
                trajectory,
                contexts=[bare(context) for context in trajectory.contexts],
                recalls=[dataclasses.replace(recall, context=bare(recall.context)) for recall in trajectory.recalls],
            )
            for trajectory in group.trajectories
        ],
    )


def test_a_file_is_read_without_the_tokens_of_its_contexts(tmp_path):
    recall = Recall(context=make_context(ref_logprobs=[0.5, 0.5, 0.5]), step=1, chunk=0, target=["x"], answer="x")
    groups = [make_group(f"g{i}") for i in range(150)]  # more than a row group holds
    groups[70].trajectories[0] = dataclasses.replace(groups[70].trajectories[0], recalls=[recall])
    write_trajectories(tmp_path / "t.parquet", groups)
    assert read_trajectories(tmp_path / "t.parquet") == groups
    bare = read_trajectories(tmp_path / "t.parquet", tokens=False)
    assert bare == [without_tokens(group) for group in groups]
    assert bare[0].trajectories[0].contexts[0].num_sampled_tokens == 2
