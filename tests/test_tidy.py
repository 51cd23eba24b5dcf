"""The rules of the house that no linter knows: circles, importers, folders, references, prose.

Tables here hold the exceptions that the tree still needs. Their numbers may only fall.
"""

from __future__ import annotations

import ast
import gc
import importlib
import re
import runpy
import subprocess
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = "anabranch"
MOST_FILES = 20  # of a folder, besides `__init__.py`
MOST_LINES = 70  # of a function
MOST_POSITIONAL = 6
MANY_LINES = 800  # a file above it says at its top why: "The file is long because …"
SMALL = 100  # lines; a file below it has several importers
# Only these import a library.
IMPORTERS = {
    "numba": ("anabranch/batches/kernels/",),
    "rocksdict": (
        "anabranch/processing/table.py",
        "anabranch/controller/rocksdb_table.py",
        "anabranch/tables/rocks.py",
        "anabranch/tables/store.py",
    ),
    "confluent_kafka": ("anabranch/librdkafka/",),
    "opentelemetry": ("anabranch/tracing.py",),
}
# Handlers that catch every `Exception` and don't raise it again, by file. A signal handler may raise an exception
# at any line of the caller's thread (Celery's time limit of a task, say): it has to come out unchanged.
WIDE = {
    "anabranch/aio/loop.py": (1, "raised in the greenlet that waits"),
    "anabranch/client/calls/derivations.py": (1, "the error of a user's function is raised with the row's key"),
    "anabranch/cli/main.py": (1, "the end of the process: each error has its exit code"),
    "anabranch/cli/options.py": (
        3, "a shell's completion shows no errors; a codec may raise any, and so may the user's module",
    ),
    "anabranch/faust/agents.py": (1, "the agent's error goes to the inbox that waits for it"),
    "anabranch/faust/app.py": (1, "a thread of its own: the app crashes with the error"),
    "anabranch/kafka/oauth_tokens.py": (1, "the user's callback: no token is no connection"),
    "anabranch/librdkafka/command_bus.py": (1, "a thread of its own, without which no call is answered"),
    "anabranch/librdkafka/groups.py": (1, "a thread of its own: its owner ends the process"),
    "anabranch/librdkafka/reconnecting_consumer.py": (1, "a thread of its own: raised by the caller's"),
    "anabranch/processing/failures.py": (3, "what handlers raise is judged; an error is pickled"),
    "anabranch/processing/program.py": (1, "the codec is called again by `encode`, which names it"),
    "anabranch/processing/threads.py": (3, "threads of their own: raised by the worker's"),
    "anabranch/processing/worker.py": (1, "a thread of its own: raised by the worker's"),
    "anabranch/controller/carrier.py": (1, "a thread of its own: raised by the leader's"),
    "anabranch/controller/controller.py": (2, "raised once the round under way is written"),
    "anabranch/controller/durability.py": (1, "a controller's process: it becomes leader again"),
    "anabranch/controller/leader.py": (1, "a controller's process: it resigns, and logs the error"),
    "anabranch/controller/service.py": (2, "a controller's process: it ends with the error"),
    "anabranch/controller/jobs.py": (1, "kept for the taker of the result"),
    "anabranch/controller/stream_topics.py": (1, "a controller's process: it tries again"),
    "anabranch/reading/decoded.py": (1, "a thread of its own: reading goes on without compiled code"),
    "anabranch/spark/codecs.py": (3, "a codec's values may be anything"),
    "anabranch/spark/jobs.py": (1, "the rows may be committed whatever the job says"),
    "anabranch/values.py": (7, "a codec may raise any error, which names it"),
    "anabranch/web/hub.py": (1, "a page of the web process shows it"),
    "anabranch/web/pages.py": (2, "a codec's values may be anything"),
}  # fmt: skip
# Ports, each with several implementations: none of them may ignore what a caller asks for.
PORTS = "anabranch/ports.py", "anabranch/client/ports.py", "anabranch/reading/committed_log.py"
DROPPED = {
    "tests/client/doubles.py: ListJournal.flush(deadline)",
    "tests/client/doubles.py: ListJournal.open(deadline)",
    "tests/client/doubles.py: ListJournal.open(topic)",
    "tests/client/doubles.py: ListJournal.write_columns(columns)",  # it takes none
    "tests/client/doubles.py: ListJournal.write_columns(placing)",
    "tests/client/doubles.py: ListJournal.write_columns(topic)",
    "tests/client/doubles.py: ScriptedBus.cluster_id(deadline)",
    "tests/client/doubles.py: ScriptedBus.control_partitions(afresh)",
    "tests/client/doubles.py: ScriptedBus.control_partitions(deadline)",
    "tests/client/doubles.py: ScriptedBus.send(more)",
    "anabranch/testing/memory/client.py: MemoryBus.cluster_id(deadline)",
    "anabranch/testing/memory/client.py: MemoryBus.control_partitions(deadline)",
    "tests/client/test_administration.py: Place.allow(_)",
    "tests/client/test_administration.py: Place.listed(_)",
    "anabranch/testing/memory/client.py: MemoryJournal.write_columns(columns)",  # they never change
    "anabranch/testing/memory/client.py: MemoryJournal.write_columns(placing)",
    "anabranch/testing/memory/client.py: MemoryJournal.write_columns(topic)",
    "anabranch/testing/memory/log.py: MemoryLog.replicas_of_new(topic)",
    "tests/reading/test_ordered_reader.py: Member.commit(wait)",
    "tests/reading/test_ordered_reader.py: Member.join(topics)",
    "tests/reading/test_ordered_reader.py: Member.serve(wait)",
    "tests/sim/groups.py: Member.commit(wait)",  # it always waits
}
# Where the product prints. Everything else prints by `cli/output.py`, which escapes what a terminal would act on.
PRINTING = {
    "print", "sys.stdout.write", "sys.stderr", "traceback.print_exception", "logging.basicConfig",
    "typer.echo", "typer.secho", "typer.confirm", "typer.prompt",
}  # fmt: skip
PRINTERS = {
    "anabranch/cli/output.py": "the one place",
    "anabranch/logs.py": "the log of a process: text is escaped as there, or it is JSON",
    "anabranch/infra/__main__.py": "its own words, before the command line is there",
    "anabranch/infra/fetch.py": "its own words and numbers",
}
# Files that nobody has merged into their importer yet have no reason here.
SMALL_FILES = {
    "anabranch/infra/__main__.py": "an entry point: `python -m anabranch.infra`",
    "anabranch/ledger/watch.py": "needs the extra `controller`, which a `Ledger` does not",
    "anabranch/spark/datasource.py": "Spark's entry point",
}
SPLIT_CLASSES = {
    "anabranch/processing/program.py: Program": "what a worker knows; `Processor.run` starts a worker",
    "anabranch/spark/api.py: DataSourceStreamArrowWriter": "Spark's class",
    "anabranch/spark/api.py: SupportsTriggerAvailableNow": "Spark's class",
    "anabranch/testing/memory/broker.py: MemoryBroker": "the log makes producers, and both need the broker",
}
FEW_IMPLEMENTATIONS = {
    "anabranch/reading/committed_log.py: Groups": "a port",
    "anabranch/waits.py: Job": "the other one is `threading.Thread`",
    "anabranch/waits.py: Queue": "the other one is `queue.SimpleQueue`",
}
# A docstring's subject comes first, and the code names it.
_HEADLESS = re.compile(r"^(?:Who|What|That|Of|It|Where|Whatever|Whoever)\b")
_COMMENT = re.compile(r"(?:^|  )# (.*)$", re.MULTILINE)
_VAGUE = re.compile(r"\b(?:nobody|anew|whoever|come to stand|for ever)\b", re.IGNORECASE)
# Words for which the glossary has others; and "so many" and its like, which are no units.
_BANNED = re.compile(
    r"(?<!`)\b(?:told|tells?|vouch\w*|hears?|lets? go|settle[sd]?|(?:give|gives|given) out|goes on|go on"
    r"|(?:set|carried) aside|beside|behind|(?<!None )(?:is|are) none|so (?:many|long|often)"
    r"|look(?:s|ed)? again|looked at|stands?)\b"
)
# The topics' names begin likewise.
_DOTTED = re.compile(
    r"`(anabranch(?!\.(?:commands|control|controllers|replies|status)\b)(?:\.\w+)+)`"
)
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.py)\b")


@cache
def listed(*suffixes: str) -> tuple[Path, ...]:
    """Files of the tree by how their names end, as git knows them."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    found = (ROOT / name for name in names if name.endswith(suffixes))
    return tuple(path for path in found if path.is_file())


class File(NamedTuple):
    """A file of the tree."""

    name: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def prose(self) -> list[str]:
        return [*docstrings(self.tree), *_COMMENT.findall(self.text)]


@cache
def parsed() -> tuple[File, ...]:
    """All Python files of the tree."""
    # A finalizer in the middle that formats a traceback parses, too: a SystemError (python/cpython#106905). And the
    # collector would walk through all trees again and again.
    gc.disable()
    try:
        return tuple(
            File(path.relative_to(ROOT).as_posix(), text := path.read_text(), ast.parse(text))
            for path in listed(".py")
        )
    finally:
        gc.freeze()
        gc.enable()


@cache
def product() -> tuple[File, ...]:
    return tuple(file for file in parsed() if file.name.startswith(f"{PRODUCT}/"))


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """`ast.walk`, once for all rules."""
    return tuple(ast.walk(tree))


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of each import, wherever it stands."""
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def docstrings(tree: ast.Module) -> Iterator[str]:
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in nodes(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


@cache
def used_files() -> dict[str, set[str]]:
    """File of the product -> those that it imports."""
    files = {file.module: file.name for file in product()}
    return {
        file.name: {
            files.get(f"{module}.{name}", files.get(module, file.name))
            for module, name in imports(file.tree)
        }
        - {file.name}
        for file in product()
    }


# -- imports, errors, output ------------------------------------------------------------------------------


def test_no_circle_of_files() -> None:
    try:
        tuple(TopologicalSorter(used_files()).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_small_files_have_several_importers() -> None:
    importers = Counter(used for files in used_files().values() for used in files)
    small = {
        file.name
        for file in product()
        if file.text.count("\n") < SMALL
        and importers[file.name] == 1
        and "__init__" not in file.name
    }
    assert small == SMALL_FILES.keys()


@pytest.mark.parametrize("library", IMPORTERS)
def test_a_library_has_its_room(library: str) -> None:
    rooms = IMPORTERS[library]
    users = [
        file.name
        for file in product()
        if any(module.split(".")[0] == library for module, _ in imports(file.tree))
    ]
    assert [name for name in users if not name.startswith(rooms)] == []
    assert [room for room in rooms if not any(name.startswith(room) for name in users)] == []


def is_wide(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches every exception, and keeps it or renames it.

    It may end with a bare `raise`, or begin with an `if` that raises again the errors that are not its own.
    """
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = [getattr(kind, "id", getattr(kind, "attr", "")) for kind in kinds]
    if not {"", "Exception", "BaseException", "FAILURES"} & {*names}:
        return False
    first, last = handler.body[0], handler.body[-1]
    if isinstance(first, ast.If) and not first.orelse:
        first = first.body[-1]
    return not any(isinstance(each, ast.Raise) and each.exc is None for each in (first, last))


def test_exceptions_of_others_come_out_as_they_are() -> None:
    found = Counter(
        file.name
        for file in product()
        for node in nodes(file.tree)
        if isinstance(node, ast.ExceptHandler) and is_wide(node)
    )
    assert found == {name: count for name, (count, _) in WIDE.items()}


@pytest.mark.parametrize(
    ("handler", "wide"),
    [
        ("except: pass", True),
        ("except BaseException as e: x.append(e)", True),
        ("except (OSError, Exception) as e: raise X from e", True),
        ("except Exception: log(); raise", False),
        ("except Exception as e:\n  if not of_it(e): raise\n  raise X from e", False),
        ("except Exception as e:\n  if not of_it(e): pass\n  raise X from e", True),
        ("except OSError: pass", False),
    ],
)
def test_a_wide_handler_is_known(handler: str, wide: bool) -> None:
    (tried,) = ast.parse(f"try: x()\n{handler}").body
    assert isinstance(tried, ast.Try)
    assert is_wide(tried.handlers[0]) == wide


def prints(tree: ast.Module) -> bool:
    """Whether a file has a name by which it could print."""
    names = {ast.unparse(n) for n in nodes(tree) if isinstance(n, ast.Attribute | ast.Name)}
    return bool(names & PRINTING) or any(module.startswith("rich") for module, _ in imports(tree))


def test_commands_print_in_one_place() -> None:
    assert {file.name for file in product() if prints(file.tree)} == PRINTERS.keys()


# -- the map, references, links ---------------------------------------------------------------------------


def test_folders_are_small() -> None:
    names = [file.name for file in product() if not file.name.endswith("/__init__.py")]
    folders = Counter(name.rpartition("/")[0] for name in names)
    assert {at: n for at, n in folders.items() if n > MOST_FILES} == {}


def test_what_texts_refer_to_is_there() -> None:
    dead = []
    for path in listed(".py", ".md"):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("docs/inside/decisions/"):
            continue  # they tell how it was then
        text = path.read_text()
        dead += [f"{name}: {dotted}" for dotted in _DOTTED.findall(text) if not _is_there(dotted)]
        dead += [
            f"{name}: {other}"
            for other in _PATH.findall(text)
            if not any((root / other).is_file() for root in (ROOT, ROOT / PRODUCT, ROOT / "tests"))
        ]
    assert dead == []


def test_links_of_pages_lead_to_files() -> None:
    """Also those that leave docs/, which the site shows as text."""
    dead = []
    for path in listed(".md"):
        text = _FENCED.sub("", path.read_text())
        links = {link.partition("#")[0] for link in _LINK.findall(text) if "://" not in link}
        name = path.relative_to(ROOT).as_posix()
        dead += [f"{name}: {link}" for link in links - {""} if not (path.parent / link).exists()]
    assert dead == []


@cache
def _is_there(dotted: str) -> bool:
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            fields = getattr(found, "__dataclass_fields__", {})
            if not hasattr(found, part) and part not in fields:
                return part in getattr(found, "__annotations__", {})
            found = getattr(found, part, None)
        return True
    return False


def test_the_layers_page_names_each_package() -> None:
    page = (ROOT / "docs/inside/architecture.md").read_text()
    packages = {file.name.split("/")[1].removesuffix(".py") for file in product()} - {"__init__"}
    assert sorted(p for p in packages if f"`{PRODUCT}.{p}`" not in page) == []


def test_the_map_has_every_file() -> None:
    trees = {ROOT / file.name: file.tree for file in product()}
    page = runpy.run_path(str(ROOT / "scripts/draw-house"))["page"](trees)
    rooms = {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}
    for name in (file.name for file in product()):
        folder, _, file = name.rpartition("/")
        shown = f"- `{file.removesuffix('.py')}`: " if file != "__init__.py" else f"{folder}\n"
        assert name == f"{PRODUCT}/__init__.py" or shown in rooms[folder], name


# -- classes, over the whole tree -------------------------------------------------------------------------


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements of a file, without what is within expressions."""
    left = deque([tree])
    while left:
        yield (one := left.popleft())
        kinds = ast.stmt, ast.excepthandler, ast.match_case
        left += (child for child in ast.iter_child_nodes(one) if isinstance(child, kinds))


@cache
def all_classes() -> tuple[list[tuple[str, ast.ClassDef]], dict[str, ast.ClassDef]]:
    """(file, class) of the whole tree, and the classes by name: the first one of each."""
    classes = [
        (file.name, node)
        for file in sorted(parsed(), key=lambda file: file.name)
        for node in statements(file.tree)
        if isinstance(node, ast.ClassDef)
    ]
    return classes, {node.name: node for _, node in reversed(classes)}


def bases_of(node: ast.ClassDef) -> list[str]:
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [base.id for base in bases if isinstance(base, ast.Name)]


@cache
def is_protocol(node: ast.ClassDef) -> bool:
    return "Protocol" in bases_of(node)


def ancestry(node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """A class, and all that it inherits from."""
    _, by_name = all_classes()
    left, seen = [node], set[str]()
    while left:
        one = left.pop()
        seen.add(one.name)
        yield one
        left += [by_name[base] for base in bases_of(one) if base in by_name and base not in seen]


@cache
def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    found = (method for method in node.body if isinstance(method, ast.FunctionDef))
    return {method.name: method for method in found if not method.name.startswith("__")}


def dropped(method: ast.FunctionDef) -> list[str]:
    """The arguments that a method's body does not use; empty for a method that only raises."""
    if isinstance(method.body[-1], ast.Raise):
        return []
    names = {n.id for line in method.body for n in nodes(line) if isinstance(n, ast.Name)}
    arguments = [*method.args.args[1:], *method.args.kwonlyargs]
    return [argument.arg for argument in arguments if argument.arg not in names]


def test_no_make_of_a_port_drops_an_argument() -> None:
    classes, _ = all_classes()
    ports = [node for path, node in classes if path in PORTS and is_protocol(node)]
    made = Counter[str]()
    found = set()
    for path, node in classes:
        names = {name for one in ancestry(node) for name in methods(one)}
        for port in ports:
            if is_protocol(node) or not methods(port).keys() <= names:
                continue
            made[port.name] += 1
            found |= {
                f"{path}: {node.name}.{name}({argument})"
                for name, method in methods(node).items()
                if name in methods(port)
                for argument in dropped(method)
            }
    assert found == DROPPED
    assert made["Log"] >= 3, "the rule no longer sees the implementations of the log"


def members(node: ast.ClassDef) -> set[str]:
    """The names that objects of a class have: methods, fields, and what its methods set."""
    found = set[str]()
    for part in (part for one in ancestry(node) for part in nodes(one)):
        match part:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return found


def test_a_protocol_has_several_implementations() -> None:
    classes, _ = all_classes()
    have = [members(node) for _, node in classes if not is_protocol(node)]
    few = set()
    for path, node in classes:
        wanted = {name for name in members(node) if not name.startswith("__")}
        counts = path.startswith(f"{PRODUCT}/") and is_protocol(node) and wanted
        if counts and sum(wanted <= names for names in have) < 2:
            few.add(f"{path}: {node.name}")
    assert few == FEW_IMPLEMENTATIONS.keys()


def split_classes() -> set[str]:
    """Base classes that have one subclass, in another file, and no objects of their own: pieces of a class."""
    places, subclasses, called = {}, Counter[tuple[str, str]](), set[tuple[str, str]]()
    outside = set[tuple[str, str]]()
    for file in product():
        taken = {what: (of, what) for of, what in imports(file.tree)}
        for node in nodes(file.tree):
            if isinstance(node, ast.ClassDef):
                if not is_protocol(node):
                    places[file.module, node.name] = file.name
                bases = bases_of(node)
                subclasses.update({taken.get(base, (file.module, base)) for base in bases})
                outside |= {taken[base] for base in bases if base in taken}
            elif isinstance(node, ast.Call | ast.ExceptHandler | ast.Raise):
                names = (n for n in nodes(node) if isinstance(n, ast.Name))
                called |= {taken.get(each.id, (file.module, each.id)) for each in names}
    return {
        f"{places[one]}: {one[1]}"
        for one, count in subclasses.items()
        if count == 1 and one in places and one in outside and one not in called
    }


def test_no_class_is_split_over_files() -> None:
    assert split_classes() == SPLIT_CLASSES.keys()


# -- rules of each file alone, without exceptions: what breaks them is yielded --------------------------------


def headless(file: File) -> Iterator[str]:
    """Sentences of docstrings and comments that have no subject."""
    sentences = (part for text in file.prose for part in re.split(r"(?<=\.)\s+", text))
    yield from filter(_HEADLESS.match, sentences)


def vague(file: File) -> Iterator[str]:
    yield from filter(_VAGUE.search, file.prose)


def bare_references(file: File) -> Iterator[str]:
    yield from (text for text in docstrings(file.tree) if re.fullmatch(r"See `[\w.]+`\.", text))


def banned_words(file: File) -> Iterator[str]:
    yield from (match[0] for part in file.prose for match in _BANNED.finditer(part))


def unexplained_length(file: File) -> Iterator[str]:
    explained = "long because" in (ast.get_docstring(file.tree) or "")
    if file.text.count("\n") > MANY_LINES and not explained:
        yield "longer than its top explains"


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in nodes(tree) if isinstance(node, Function))


def is_free(name: str, function: Function) -> bool:
    """Whether a function may be long, and have many parameters: a command of the CLI, or compiled."""
    marks = " ".join(map(ast.unparse, function.decorator_list))
    command = name.startswith(f"{PRODUCT}/cli/") and (
        ".command(" in marks or "option(" in ast.unparse(function.args)
    )
    return command or "/kernels/" in name or "compiled" in marks or "njit" in marks


def positional(function: Function) -> int:
    """How many arguments may be given by position, besides ``self`` and ``cls``."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - bool(names and names[0] in ("self", "cls"))


def long_functions(file: File) -> Iterator[str]:
    for function in functions(file.tree):
        lines = (function.end_lineno or 0) - function.lineno
        if lines >= MOST_LINES and not is_free(file.name, function):
            yield function.name


def functions_of_many_arguments(file: File) -> Iterator[str]:
    for function in functions(file.tree):
        if positional(function) > MOST_POSITIONAL and not is_free(file.name, function):
            yield function.name


def splats(file: File) -> Iterator[str]:
    """Functions with calls that take a tuple apart as their arguments, so that these have no names."""
    for function in functions(file.tree):
        tuples = {
            node.targets[0].id
            for node in nodes(function)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Tuple)
            and isinstance(node.targets[0], ast.Name)
        }
        for call in nodes(function):
            for given in call.args if isinstance(call, ast.Call) else ():
                if isinstance(given, ast.Starred):
                    text = ast.unparse(given.value)
                    if isinstance(given.value, ast.Tuple) or text in tuples:
                        yield function.name


def truths(tree: ast.Module) -> set[str]:
    """Names that this file says are true or false."""
    noted = {
        node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
        for node in nodes(tree)
        if isinstance(node, ast.arg | ast.AnnAssign)
        and isinstance(node.annotation, ast.Name)
        and node.annotation.id == "bool"
    }
    found = (node for node in nodes(tree) if isinstance(node, ast.Assign))
    compared = {ast.unparse(node.targets[0]) for node in found if is_truth(node.value, set())}
    other = {
        ast.unparse(node.targets[0])
        for node in nodes(tree)
        if isinstance(node, ast.Assign) and not is_truth(node.value, set())
    }
    return noted | (compared - other)


def is_truth(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression is surely true or false, and nothing else."""
    match node:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Call(func=ast.Name(id=called)):
            return called in ("bool", "isinstance", "any", "all", "callable", "hasattr")
        case ast.BoolOp(values=values):
            return all(is_truth(value, names) for value in values)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in names
    return False


def products_of_truths(file: File) -> Iterator[str]:
    names = truths(file.tree)
    for node in nodes(file.tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = node.left, node.right
            yield from (ast.unparse(node) for side in sides if is_truth(side, names))


def shared_lines(file: File) -> Iterator[str]:
    """Constants that share a line; not those that `range` numbers."""
    for node in file.tree.body:
        if not isinstance(node, ast.Assign):
            continue
        targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        numbered = ast.unparse(node.value).startswith("range(")
        if len(names) > 1 and all(map(str.isupper, names)) and not numbered:
            yield ", ".join(names)


@pytest.mark.parametrize(
    "rule",
    [
        headless, vague, bare_references, banned_words, unexplained_length, long_functions,
        functions_of_many_arguments, splats, products_of_truths, shared_lines,
    ],
)  # fmt: skip
def test_no_file_breaks_a_rule(rule: Callable[[File], Iterator[str]]) -> None:
    assert {file.name: found for file in product() if (found := [*rule(file)])} == {}


@pytest.mark.parametrize(
    ("rule", "text", "found"),
    [
        (headless, '"""What is there."""', True),
        (headless, "x = 1  # A comment says so.", False),
        (banned_words, "x = 1  # it goes on", True),
        (long_functions, "def f():\n" + "  x()\n" * MOST_LINES, True),
        (functions_of_many_arguments, "def f(a, b, c, d, e, f, g): pass", True),
        (functions_of_many_arguments, "def f(self, a, b, c, d, e, f, *, g): pass", False),
        (unexplained_length, "x = 1\n" * (MANY_LINES + 1), True),
        (splats, "def f():\n  how = a, b\n  return g(*how)", True),
        (splats, "def f():\n  return g(*(a, b))", True),
        (splats, "def f(how):\n  return g(*how)", False),
        (products_of_truths, "x = 'a' * (b > 1)", True),
        (products_of_truths, "def f(b: bool): return 'a' * b", True),
        (products_of_truths, "late = a > b\nx = 3 * late", True),
        (products_of_truths, "def f(b: int): return 3 * b", False),
        (shared_lines, "A, B = 1, 2", True),
        (shared_lines, "A = B = 1", True),
        (shared_lines, "A, B = range(2)", False),
        (shared_lines, "A = 1, 2", False),
    ],
)
def test_a_rule_sees_what_breaks_it(
    rule: Callable[[File], Iterator[str]], text: str, found: bool
) -> None:
    assert any(rule(File(f"{PRODUCT}/x.py", text, ast.parse(text)))) == found
