"""The sink's refusals: by name, on the driver, before any task runs, saying what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

import anabranch
from anabranch.errors import InvalidArgument
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.spark.options import Options
from anabranch.spark.sink.writer import target_of
from tests.spark.sink_place import Place, numbers, put_file, schema_of, stream_files

pytestmark = [pytest.mark.broker, pytest.mark.slow(10)]

KV = "key string, value string"
# columns, options, what the error says
REFUSED = [
    (KV, {}, "where to? Give option stream=scope/name"),
    (KV, {"stream": "a/b", "scope": "a"}, "give option stream, or scope and a column 'stream', not both"),
    (KV, {"stream": "a"}, "'a' is not a stream: scope/stream"),
    (KV, {"stream": "a/b", "bootstrap": ""}, "no address: give option bootstrap"),
    (KV, {"stream": "a/b", "straem": "a/c"}, "unknown option straem; there are "),
    (KV, {"stream": "a/b", "path": "a/b"}, "a path means nothing here: give option stream"),
    (KV, {"stream": "a/b", "keepalive": "0.5"}, "option keepalive='0.5': seconds above 1"),
    (KV, {"stream": "a/b", "encoding": "xml"}, "option encoding='xml': one of raw, json, avro"),
    (KV, {"scope": "a"}, "no column 'stream' (scope/name): add one"),
    (f"{KV}, stream string", {"stream": "a/b"}, "drop the column, or give option scope instead"),
    (f"{KV}, carrier string", {"stream": "a/b"}, "not carrier: select those, or give option encoding=json"),
    ("key string", {"stream": "a/b"}, "and value has to be there"),
    ("value int", {"stream": "a/b"}, "column value is int, and binary or string is needed: cast it"),
    ("value string, headers array<string>", {"stream": "a/b"}, "column headers is array<string>"),
    ("value string, timestamp long", {"stream": "a/b"}, "column timestamp is bigint, and timestamp is needed"),
    (KV, {"stream": "a/b", "keycolumn": "key"}, "options keycolumn, keepkey and timestampcolumn are for"),
    (KV, {"stream": "a/b", "encoding": "json", "key": "key"}, "name the columns of the key in option keycolumn"),
    (KV, {"stream": "a/b", "key": "text"}, "option key: codec 'text': bytes, str, json, or MODULE:NAME"),
    (KV, {"stream": "a/b", "value": "no_such:Order"}, "can't be imported: ModuleNotFoundError"),
    (KV, {"stream": "a/b", "value": "no_such:Order"}, "give its module to Spark: --py-files"),
    (KV, {"stream": "a/b", "value": "json:decoder.x"}, "codec 'json:decoder.x' can't be imported: AttributeError"),
    (KV, {"stream": "a/b", "value": "os:path"}, "option value: <module"),
    (KV, {"stream": "a/b", "undecodable": "skip"}, "unknown option undecodable"),
    ("value string", {"stream": "a/b", "key": "str"}, "option key=str: a codec of the column key, which"),
    ("value int", {"stream": "a/b", "value": "str"}, "column value is int, and string is needed for codec str"),
    ("value int", {"stream": "a/b", "value": "tests.values.kinds:Order"}, "string (JSON) or struct is needed"),
    (KV, {"stream": "a/b", "avroschema": "{}"}, "option avroschema is for encoding=avro, not raw"),
    ("a int, A int", {"stream": "a/b", "encoding": "json"}, "columns of the same name: a;"),
    ("a int", {"stream": "a/b", "encoding": "json", "keycolumn": "b"}, "option keycolumn: there is no column 'b'"),
    ("a int", {"stream": "a/b", "encoding": "json", "keepkey": "false"}, "keepkey=false needs option keycolumn"),
    ("a int", {"stream": "a/b", "encoding": "json", "timestampcolumn": "a"}, "timestampcolumn: column a is int"),
    ("a interval", {"stream": "a/b", "encoding": "json"}, "column a has type interval, which has no JSON"),
    ("a struct<b: map<int, int>>", {"stream": "a/b", "encoding": "json"}, "column a.b: a map's keys are int"),
    ("a interval", {"stream": "a/b", "encoding": "avro"}, "column a has type interval, which has no Avro"),
    ("`a b` int", {"stream": "a/b", "encoding": "avro"}, "column 'a b': a name in Avro is letters"),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "options", "says"), REFUSED)
def test_a_wrong_column_or_option_is_refused(
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    columns: str,
    options: dict[str, str],
    says: str,
) -> None:
    monkeypatch.delenv("ANABRANCH_BOOTSTRAP", raising=False)
    with pytest.raises(InvalidArgument) as refused:
        target_of(Options({"bootstrap": "b:1"} | options), schema_of(columns))
    assert says in str(refused.value)


RECORD = '{"type": "record", "name": "R", "fields": [%s]}'
INT_A = '{"name": "a", "type": "int"}'
INNER = f'{{"type": "record", "name": "S", "fields": [{INT_A}]}}'
LONG = '{"type": "long", "logicalType": "%s"}'
# columns, Avro schema, what the error says
UNFIT = [
    ("a int", "{", "option avroschema is no Avro schema"),
    ("a int", '"int"', "option avroschema: a record is needed"),
    ("a int", RECORD % f'{INT_A}, {{"name": "b", "type": "int"}}', "no column for b, which have no default"),
    ("a int, b int", RECORD % INT_A, "no field for b: drop them or add fields"),
    ("a string", RECORD % INT_A, 'column a is string, which "int" does not take'),
    ("a long", RECORD % INT_A, 'column a is bigint, which "int" does not take'),
    ("a array<string>", RECORD % '{"name": "a", "type": {"type": "array", "items": "int"}}',
     "column a.element is string"),
    ("a timestamp", RECORD % '{"name": "a", "type": ["null", "long"]}', "column a is timestamp"),
    ("a struct<b: int>", RECORD % f'{{"name": "a", "type": {INNER}}}', "no column in a for a"),
    ("a int", RECORD % '{"name": "a", "type": {"type": "string", "logicalType": 5}}', "column a is int"),
    ("a long", RECORD % '{"name": "a", "type": ["null", "double", "long"]}', "let the finer one come first"),
    ("a int", RECORD % '{"name": "a", "type": ["null", "float", "long"]}', "column a would lose digits"),
    *(
        ("a timestamp", RECORD % f'{{"name": "a", "type": [{coarse}, {LONG % "timestamp-micros"}]}}', "lose digits")
        for coarse in (LONG % "timestamp-millis", '{"type": "int", "logicalType": "date"}')
    ),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "avro", "says"), UNFIT)
def test_unfit_avro_schemas(spark: SparkSession, columns: str, avro: str, says: str) -> None:
    options = {"bootstrap": "b:1", "stream": "a/b", "encoding": "avro", "avroschema": avro}
    with pytest.raises(InvalidArgument) as refused:
        target_of(Options(options), schema_of(columns))
    assert says in str(refused.value)


@pytest.mark.long
def test_refusals_come_from_the_driver(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """Before any task runs, and by name. Each starts a process: what they refuse is tested without one above."""
    rows = numbers(spark, 10)
    with pytest.raises(AnalysisException, match=r"UnknownStream: .*nowhere"):
        place.save(rows, stream=f"{place.scope}/nowhere")
    with pytest.raises(
        AnalysisException, match=r"InvalidArgument: mode\(.overwrite.\): .* use mode"
    ):
        place.save(rows, "overwrite")
    put_file(tmp_path, 0, 1, 0)
    with pytest.raises(PySparkException, match="InvalidArgument: unknown option name"):
        stream_files(spark, place, tmp_path, name="x")
    assert place.transactions() == []


@pytest.mark.long
def test_the_source_of_a_derived_table_is_refused(spark: SparkSession, place: Place) -> None:
    """A task is: the sink does not run the function. Nothing of the others is committed."""
    source = f"{place.scope}/orders"
    with anabranch.connect(place.bootstrap, lane=ADMIN_LANE) as operator:
        operator.feature_level(raise_to=LEVEL)
        operator.grant("open", f"{place.scope}/*", "operate")
    place.client.create_table(source)
    with anabranch.connect(place.bootstrap) as deriving:
        deriving.derive(source, "by-value", lambda _, row: row)
    with pytest.raises(PySparkException, match=r"DerivationMissing: .*is the source of derivation"):
        place.save(numbers(spark, 10), stream=source)
    assert list(place.client.snapshot(source).read(source)) == []
