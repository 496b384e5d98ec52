"""Settings from a YAML file, the environment and the command line, checked strictly; all mistakes in one message.

Every command that takes CONFIG uses `load`; `flatout config schema|show|validate` print its results.
Later sources win: default, preset, file, environment (`FLATOUT__TRAIN__LR=3e-4`), command line (`train.lr=3e-4`).

The type of its key decides how a scalar is read, not YAML's own rules, so `lr: 6e-4` is a number
and `wandb: off` is text. pydantic is imported on first use, and only here: the rest of the program takes plain
dataclasses.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml
from yaml.representer import SafeRepresenter

from flatout import limits as largest
from flatout.config.nearest import nearest, suggest
from flatout.config.presets import implied
from flatout.config.rules import breaches
from flatout.config.settings import Loaded, PlanSettings, Settings, Source, settable
from flatout.errors import UsageError
from flatout.files import BadFile, path_problem, read_bytes, shown_path

if TYPE_CHECKING:
    from pydantic import BaseModel

ENVIRONMENT_PREFIX = "FLATOUT__"
# A section given as a single word sets this key of the section.
SHORTHANDS = {"model": "model.name"}

_PRECEDENCE: tuple[Source, ...] = ("default", "preset", "file", "environment", "command line")
_SWITCH_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_TAG = "tag:yaml.org,2002:"
# The tags of plain YAML values; any other tag would construct an object.
_PLAIN_TAGS = {*yaml.SafeLoader.yaml_constructors, f"{_TAG}value", f"{_TAG}merge"}
_MAX_SHOWN_LENGTH = 60
# Configurations are written by hand. A larger file is something else, or an attack.
MOST_BYTES, MOST_VALUES, DEEPEST = 1 << 20, 4_000, 32
MOST_MISTAKES = 20
_LARGEST = 2**63 - 1
_TRUST = "model.trust_remote_code"
_HOW_TO_TRUST = "trust is given on the command line only, each time: --trust-remote-code PIN; remove it here"


class Shown(NamedTuple):
    """One line of `flatout config show`."""

    key: str
    value: Any
    source: Source
    help: str
    label: str  # the source in words: the name of the preset


def load(path: str | Path | None, *, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Loaded:
    """Loads the settings of a run from a file (if any), the environment and `key=value` overrides."""
    gathered = _Gathered()
    if path is not None:
        gathered.add_mapping(_read(Path(path)), source="file")
    gathered.add_environment(os.environ if environ is None else environ)
    gathered.add_overrides(overrides)
    return gathered.loaded(title="settings" if path is None else str(path))


def from_mapping(values: Mapping[str, Any]) -> Settings:
    """Settings from nested plain values, with all checks and without the environment."""
    node = SafeRepresenter().represent_data(dict(values))
    assert isinstance(node, yaml.MappingNode)
    gathered = _Gathered()
    gathered.add_mapping(node, source="file")
    return gathered.loaded(title="settings").settings


def to_mapping(settings: Settings) -> dict[str, Any]:
    """Nested plain values of every setting, for YAML and JSON."""
    return _plain(settings)


def _plain(section: Any) -> dict[str, Any]:
    return {field.name: _plain_value(getattr(section, field.name)) for field in settable(type(section))}


def _plain_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    return _plain(value) if is_dataclass(value) else value


def dump(settings: Settings) -> str:
    """YAML of every setting, which loads back to equal settings."""
    # No allow_unicode: some unescaped line separators would be read back as spaces.
    return yaml.safe_dump(to_mapping(settings), sort_keys=False)


def schema() -> dict[str, Any]:
    """JSON Schema of the configuration file, for editors and other tools."""
    document = _model(Settings).model_json_schema()
    for section in SHORTHANDS:
        by_keys = document["properties"][section]
        document["properties"][section] = {"anyOf": [{"type": "string"}, by_keys]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}


@cache
def _single_underscores() -> dict[str, str]:
    """The variables that somebody may write for those that are read."""
    return {
        f"FLATOUT_{key.replace('.', '_').upper()}": f"{ENVIRONMENT_PREFIX}{key.replace('.', '__').upper()}"
        for key in _leaves()
    }


def keys() -> list[str]:
    """Every dotted key."""
    return list(_leaves())


def show(loaded: Loaded) -> list[Shown]:
    """Every key with its value, its source and its help line."""
    return [
        Shown(
            key=key,
            value=_value_of(loaded.settings, key),
            source=loaded.sources[key],
            help=leaf.help,
            label=loaded.labels.get(key, loaded.sources[key]),
        )
        for key, leaf in _leaves().items()
    ]


# --- available keys ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Leaf:
    """A key that holds a value: its type without None, or its choices, and whether it may be null."""

    kind: Any
    choices: tuple[str, ...]
    optional: bool
    help: str
    path: bool = False
    words: tuple[str, ...] = ()  # that it takes instead of a value of its type

    @property
    def takes_text(self) -> bool:
        return self.kind is str or bool(self.choices)

    @property
    def takes_texts(self) -> bool:
        """Whether it takes a list, or comma-separated items."""
        return get_origin(self.kind) is tuple and get_args(self.kind)[0] is str

    @property
    def takes_sections(self) -> type[Any] | None:
        """The dataclass of its items, if it takes a list of sections."""
        item = get_args(self.kind)[0] if get_origin(self.kind) is tuple else None
        return item if isinstance(item, type) and is_dataclass(item) else None

    @property
    def wanted(self) -> str:
        kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        if self.choices:
            wanted = f"one of {', '.join(self.choices)}"
        elif self.takes_texts:
            wanted = "a list of texts such as [one, two]"
        elif kind := self.takes_sections:
            wanted = f"a list of items with the keys {', '.join(field.name for field in settable(kind))}"
        else:
            wanted = kinds.get(self.kind, "a list of two whole numbers such as [10, 12]")
        if self.words:
            wanted = f"{wanted} or {' or '.join(self.words)}"
        return f"{wanted}, or null" if self.optional else wanted


@cache
def _leaves() -> dict[str, _Leaf]:
    return _leaves_in(Settings)


def _leaves_in(kind: type[Any]) -> dict[str, _Leaf]:
    return dict(_leaves_of(kind, prefix=""))


def _leaves_of(kind: type[Any], *, prefix: str) -> Iterator[tuple[str, _Leaf]]:
    hints = get_type_hints(kind)
    for field in settable(kind):
        key, hint = prefix + field.name, hints[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _leaves_of(hint, prefix=f"{key}.")
            continue
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        optional = types.NoneType in options
        literals = [option for option in options if get_origin(option) is Literal]
        kinds = [option for option in options if option not in (*literals, types.NoneType)]
        (hint,) = kinds or literals
        words = tuple(word for option in literals for word in get_args(option))
        yield (
            key,
            _Leaf(
                kind=hint,
                choices=() if kinds else words,
                optional=optional,
                help=field.metadata["help"],
                words=words if kinds else (),
                path=field.metadata["path"],
            ),
        )


@cache
def _sections() -> dict[str, str]:
    """The sections and their help lines."""
    hints = get_type_hints(Settings)
    return {field.name: field.metadata["help"] for field in fields(Settings) if is_dataclass(hints[field.name])}


def _bounded(rules: Mapping[str, Any]) -> dict[str, Any]:
    """The rules of a number, within what can be recorded and drawn."""
    low = {} if rules.keys() & {"ge", "gt"} else {"ge": -largest.REAL}
    return {**rules, **low} if rules.keys() & {"le", "lt"} else {**rules, **low, "le": largest.REAL}


def _each(hint: Any, rules: Mapping[str, Any]) -> Any:
    """The types of the items of an optional tuple, all under the same rules."""
    from pydantic import Field

    (several,) = (option for option in get_args(hint) if option is not types.NoneType)
    return tuple(Annotated[item, Field(**rules)] for item in get_args(several))


@cache
def _model(kind: type[Any]) -> type[BaseModel]:
    """The strict pydantic model of a dataclass of settings."""
    from pydantic import ConfigDict, Field, create_model

    hints = get_type_hints(kind)
    definitions: dict[str, Any] = {}
    for field in settable(kind):
        hint, help, rules = hints[field.name], field.metadata["help"], field.metadata["rules"]
        if float in (hint, *get_args(hint)):
            rules = _bounded(rules)
        if "each" in rules:
            hint, rules = tuple[_each(hint, rules["each"])] | None, {}  # type: ignore[misc]
        if get_origin(hint) is tuple and is_dataclass(item := get_args(hint)[0]):
            hint = tuple[_model(item), ...]  # type: ignore[misc, arg-type]
        if field.default is MISSING:
            section = _model(hint)
            definitions[field.name] = (section, Field(default_factory=section, description=help))
        else:
            hint = Annotated[_limited(hint, rules), Field(description=help)]
            definitions[field.name] = (hint, field.default)
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: type[BaseModel] = create_model(kind.__name__, __config__=config, **definitions)
    return model


def _limited(hint: Any, rules: Mapping[str, Any]) -> Any:
    """A type with its rules; of a number that may also be a word, only the number has them."""
    from pydantic import Field

    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    words = [option for option in options if get_origin(option) is Literal]
    numbers = [option for option in options if option in (int, float)]
    if not rules or not words or not numbers:
        return Annotated[hint, Field(**rules)]
    return Union[Annotated[numbers[0], Field(**rules)], *words, types.NoneType]


# --- given values ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a value was given; `label` names the place in messages."""

    source: Source
    label: str = ""
    line: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        return _PRECEDENCE.index(self.source), self.line

    def prefixed(self, text: str) -> str:
        return f"{self.label}: {text}" if self.label else text


@dataclass(frozen=True, kw_only=True)
class _Given:
    """A value ready for the schema, its original text, and its place."""

    value: Any
    text: str
    place: _Place


class _Gathered:
    """The values from all sources, lowest precedence first, and every mistake found in them."""

    def __init__(self) -> None:
        self.given: dict[str, _Given] = {}
        self.mistakes: list[tuple[_Place, str]] = []
        # Keys whose value is unknown because of a mistake. Rules about them are skipped: they would only add noise.
        self.doubtful: set[str] = set()

    def add_mapping(self, node: yaml.MappingNode, *, source: Source, section: str = "") -> None:
        seen: dict[str, _Place] = {}
        if node.tag not in _PLAIN_TAGS:
            self.mistakes.append((_place_of(node, source=source), f"{section or 'the file'}: {_refused(node)}"))
            return
        for key_node, value_node in node.value:
            place = _place_of(key_node, source=source)
            if not isinstance(key_node, yaml.ScalarNode):
                self.mistakes.append((place, "a key must be one word"))
                continue
            key = f"{section}.{key_node.value}" if section else key_node.value
            if key in seen:
                first = f" ({seen[key].label})" if seen[key].label else ""
                self.mistakes.append((place, f"{_short(key)}: given twice{first}; keep one"))
                continue
            seen[key] = place
            if key in _sections() and isinstance(value_node, yaml.MappingNode):
                self.add_mapping(value_node, source=source, section=key)
            elif key in _sections() and _is_null(value_node):
                pass  # a section whose lines are all commented out
            elif not section and "." in key and key in _leaves():
                parent, _, leaf = key.partition(".")
                self.mistakes.append((place, f"{key}: in a file, write {leaf} under {parent}:"))
                self.doubtful.add(key)
            else:
                self._add(key, value_node, place=place)

    def add_environment(self, environ: Mapping[str, str]) -> None:
        names: dict[str, str] = {}
        for name, text in sorted(environ.items()):
            if not name.upper().startswith(ENVIRONMENT_PREFIX):
                if meant := _single_underscores().get(name.upper()):
                    place = _Place(source="environment", label=f"environment {name}")
                    self.mistakes.append((place, f"is not read; write {meant}={_short(text)}, with two underscores"))
                continue
            key = name[len(ENVIRONMENT_PREFIX) :].lower().replace("__", ".")
            place = _Place(source="environment", label=f"environment {name}")
            if key in names:
                self.mistakes.append((place, f"{key}: also given by {names[key]}; unset one"))
                continue
            names[key] = name
            self._add(key, text, place=place)

    def add_overrides(self, overrides: Sequence[str]) -> None:
        place = _Place(source="command line", label="command line")
        for override in overrides:
            key, equals, text = override.partition("=")
            if equals:
                self._add(key, text, place=place)
            else:
                self.mistakes.append((place, f"{_short(override)} must be key=value, such as train.lr=3e-4"))

    def _add(self, key: str, value: yaml.Node | str, *, place: _Place) -> None:
        """One key with its value: a YAML node, or text from the environment or the command line."""
        if key in SHORTHANDS and isinstance(value, (str, yaml.ScalarNode)):
            # It replaces the whole section, including the values from weaker sources.
            weaker = [name for name, given in self.given.items() if given.place.source != place.source]
            for name in weaker:
                if name.startswith(f"{key}."):
                    del self.given[name]
            key = SHORTHANDS[key]
        if key == _TRUST:
            # Older versions wrote `false` into every run folder; it requests nothing.
            if place.source != "file" or not isinstance(value, yaml.ScalarNode) or value.value != "false":
                self.mistakes.append((place, f"{key}: {_HOW_TO_TRUST}"))
        elif key in _sections():
            names = [name for name in _leaves() if name.startswith(f"{key}.")]
            text = _short(value if isinstance(value, str) else _text_of(value))
            hint = f"set its keys: {', '.join(name.removeprefix(f'{key}.') for name in names)}"
            self.mistakes.append((place, f"{key}: {text} was given for a whole section; {hint}"))
            self.doubtful.update(names)
        elif key not in _leaves():
            self._add_unknown(key, place=place)
        else:
            try:
                self.given[key] = _decoded(_unpinned(key, value), leaf=_leaves()[key], place=place)
            except ValueError as error:
                self.mistakes.append((place, f"{key}: {error}"))
                self.doubtful.add(key)

    def _add_unknown(self, key: str, *, place: _Place) -> None:
        if len(self.mistakes) >= MOST_MISTAKES:  # it will not be shown
            self.mistakes.append((place, f"{_short(key)}: unknown key"))
            return
        known = _sections() | {name: leaf.help for name, leaf in _leaves().items()}
        suggestions = suggest(key, known=known)
        if suggestions:
            hint = f"did you mean {_joined(suggestions)}?"
        else:
            section = key.rpartition(".")[0]
            siblings = [name for name in known if name.rpartition(".")[0] == section]
            hint = f"known keys: {', '.join(siblings or _sections())}"
        self.mistakes.append((place, f"{_short(key)}: unknown key; {hint}"))
        for name in suggestions:
            self.doubtful.update(leaf for leaf in _leaves() if leaf == name or leaf.startswith(f"{name}."))

    def loaded(self, *, title: str) -> Loaded:
        """Returns the settings, or raises one error with all mistakes."""
        for key, one in implied({key: one.value for key, one in self.given.items()}).items():
            place = _Place(source="preset", label=one.label)
            self.given[key] = _Given(value=one.value, text=str(one.value), place=place)
        settings = self._validated()
        by_preset = [key.removeprefix("plan.") for key, one in self.given.items() if one.place.source == "preset"]
        names = {field.name for field in settable(PlanSettings)}
        set_by_preset = tuple(name for name in by_preset if name in names)
        settings = replace(settings, plan=replace(settings.plan, implied=set_by_preset))
        for breach in breaches(settings):
            if self.doubtful.isdisjoint(breach.keys):
                self._add_breach(breach.keys, breach.text)
        if self.mistakes:
            count = len(self.mistakes)
            lines = [place.prefixed(text) for place, text in sorted(self.mistakes, key=lambda m: m[0].rank)]
            more = [f"and {count - MOST_MISTAKES} more"] if count > MOST_MISTAKES else []
            shown = [f"{title}: {count} mistake{'s' if count > 1 else ''}", *lines[:MOST_MISTAKES], *more]
            raise UsageError("\n".join(shown))
        sources: dict[str, Source] = {
            key: self.given[key].place.source if key in self.given else "default" for key in _leaves()
        }
        labels = {key: one.place.label for key, one in self.given.items() if one.place.source == "preset"}
        return Loaded(settings=settings, sources=sources, labels=labels)

    def _validated(self) -> Settings:
        """The settings. A refused value becomes a mistake and keeps its default, so that the rules can still run."""
        from pydantic import ValidationError

        model = _model(Settings)
        try:
            valid = model.model_validate(_nested(self.given))
        except ValidationError as refusal:
            refused: set[str] = set()
            for error in refusal.errors(include_url=False):
                key = ".".join(map(str, error["loc"][:2]))  # a third part would be the item of a list
                if key in refused:
                    continue
                refused.add(key)
                given = self.given[key]
                leaf, text = _leaves()[key], given.text
                if (kind := leaf.takes_sections) and len(error["loc"]) > 3:
                    item, name = error["loc"][2:4]
                    leaf, text = _leaves_in(kind)[str(name)], _short(str(error["input"]))
                    key = f"{key}[{item}].{name}"
                rule = _rule(leaf, kind=error["type"], limits=error.get("ctx", {}), text=text)
                self.mistakes.append((given.place, f"{key}: {text} {rule}"))
            self.doubtful |= refused
            valid = model.model_validate(_nested({k: v for k, v in self.given.items() if k not in refused}))
        settings: Settings = _built(Settings, valid.model_dump())
        return settings

    def _add_breach(self, keys: tuple[str, ...], text: str) -> None:
        """Reports the mistake at the key that was given last, because that one broke the rule."""
        places = {key: self.given[key].place for key in keys if key in self.given}
        if not places:
            self.mistakes.append((_Place(source="default"), f"{keys[0]}: {text}"))
            return
        last = max(_PRECEDENCE.index(place.source) for place in places.values())
        place = next(place for place in places.values() if _PRECEDENCE.index(place.source) == last)
        self.mistakes.append((place, f"{keys[0]}: {text}"))


def _nested(given: Mapping[str, _Given]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, one in given.items():
        section, _, leaf = key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[leaf] = one.value
    return values


def _built(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """The dataclass, sections included, from validated values."""
    hints = get_type_hints(kind)

    def built(hint: Any, value: Any) -> Any:
        if is_dataclass(hint):
            assert isinstance(hint, type)
            return _built(hint, value)
        items = get_args(hint)[0] if get_origin(hint) is tuple else None
        return tuple(built(items, item) for item in value) if is_dataclass(items) else value

    return kind(**{name: built(hints[name], value) for name, value in values.items()})


def _value_of(settings: Settings, key: str) -> Any:
    value: Any = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value


# --- from text to values -----------------------------------------------------------------------------------


def _read(path: Path) -> yaml.MappingNode:
    """The file's top-level mapping, as nodes with line numbers."""
    if os.path.isdir(path) and os.access(path, os.R_OK):
        inside = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".yaml", ".yml"))
        hint = f": {', '.join(inside[:8])}" if inside else ""
        raise UsageError(f"{path}: a folder; name the YAML file in it{hint}")
    try:
        content = read_bytes(path, limit=MOST_BYTES)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file{_where_instead(path)}") from None
    except BadFile as error:
        raise UsageError(f"{path}: {error.why}; give a YAML file of settings") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path}: not a text file in UTF-8 (byte 0x{content[error.start]:02x} in line {line}); "
            "give a YAML file saved as UTF-8"
        ) from None
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UsageError(f"{path}{_syntax(error)}") from None
    if node is None:
        raise UsageError(f"{path}: the file is empty; `flatout examples` lists configurations to start from")
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{path}: must hold settings as `key: value` lines, but holds {_short(_text_of(node))}")
    return node


class _TooMuch(yaml.YAMLError):
    """The file is larger or deeper than any configuration."""


class _Loader(yaml.SafeLoader):
    """Composes YAML nodes, and stops early at a text that is too large or too deep."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._values = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._values += 1
        self._depth += 1
        if self._depth > DEEPEST:
            raise _TooMuch("nested too deeply")
        if self._values > MOST_VALUES:
            raise _TooMuch(f"more than {MOST_VALUES:,} keys and values")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _where_instead(path: Path) -> str:
    """A hint about which file may have been meant."""
    package = Path(__file__).parents[1]
    for folder in (package / "examples", package.parents[1] / "examples"):  # installed; in a checkout
        shipped = folder / f"{path.stem}.yaml"
        if path.name == str(path) and shipped.is_file():
            return f"; {path.stem} is a shipped example: `flatout examples {path.stem} --to {path.stem}.yaml` copies it"
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist either"
    readable = os.access(path.parent, os.R_OK)
    files = [entry.name for entry in path.parent.iterdir() if entry.is_file()] if readable else []
    near = [name for name in (f"{path.name}.yaml", f"{path.name}.yml") if name in files]
    near = near or nearest(path.name, files)
    return f"; did you mean {_joined([str(path.parent / name) for name in near])}?" if near else ""


def _syntax(error: Exception) -> str:
    if isinstance(error, _TooMuch):
        return f": not valid settings: {error}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        at = f":{error.problem_mark.line + 1}:{error.problem_mark.column + 1}"
        problem = f"{error.problem} ({error.context})" if error.context else f"{error.problem}"
        hint = "; indent with spaces, not tabs" if "\\t" in problem else ""
        return f"{at}: not valid YAML: {problem}{hint}"
    return f": not a YAML text file: {str(error).splitlines()[0]}"


def _decoded(value: yaml.Node | str, *, leaf: _Leaf, place: _Place) -> _Given:
    """The value of one key. Raises ValueError, worded for the user, if the text cannot be read at all."""
    if isinstance(value, yaml.Node):
        return _Given(value=_usable(_from_node(value, leaf=leaf), leaf=leaf), text=_short(_text_of(value)), place=place)
    if not value.isascii() and value != value.encode(errors="ignore").decode():
        raise ValueError(f"{_short(value)!a} is not UTF-8 text")
    # Quotes mean the same as in YAML. A list needs YAML too, but `data.path=[ab]*.txt` is only text.
    if value.startswith(("'", '"')) or (not leaf.takes_text and value.startswith("[")):
        try:
            node = yaml.compose(value, Loader=_Loader)
        except yaml.YAMLError:
            raise ValueError(f"{_short(value)} is not a complete value; check its quotes and brackets") from None
        assert node is not None
        return _Given(value=_usable(_from_node(node, leaf=leaf), leaf=leaf), text=_short(value), place=place)
    if value == "null" or (not value and (leaf.optional or not leaf.takes_text)):
        return _Given(value=None, text="null", place=place)
    return _Given(value=_usable(_from_text(value, leaf=leaf), leaf=leaf), text=_short(value), place=place)


def _usable(value: Any, *, leaf: _Leaf) -> Any:
    """The value, which must be a possible path if the key may name a file."""
    if leaf.path and isinstance(value, str) and (problem := path_problem(value)):
        raise ValueError(f"{shown_path(value)} {problem}")
    return value


def _unpinned(key: str, value: yaml.Node | str) -> yaml.Node | str:
    """Replaces `auto` for a decision of the plan with null, which means the same."""
    text = value.value if isinstance(value, yaml.ScalarNode) else value
    return "null" if key.startswith("plan.") and key != "plan.preset" and text == "auto" else value


def _from_node(node: yaml.Node, *, leaf: _Leaf) -> Any:
    if node.tag not in _PLAIN_TAGS:
        raise ValueError(_refused(node))
    if isinstance(node, yaml.SequenceNode) and (kind := leaf.takes_sections):
        return tuple(_section_item(child, kind=kind, number=i) for i, child in enumerate(node.value))
    if isinstance(node, yaml.SequenceNode) and get_origin(leaf.kind) is tuple:
        item = _Leaf(kind=get_args(leaf.kind)[0], choices=(), optional=False, help="")
        return tuple(_from_node(child, leaf=item) for child in node.value)
    if not isinstance(node, yaml.ScalarNode):
        return node  # no key takes a list or mapping here: the schema refuses it, and the message shows it
    if _is_null(node):
        return None
    return node.value if _is_quoted(node) and not leaf.takes_texts else _from_text(node.value, leaf=leaf)


def _section_item(node: yaml.Node, *, kind: type[Any], number: int) -> dict[str, Any]:
    """The keys of one item of a list of sections."""
    leaves = _leaves_in(kind)
    if not isinstance(node, yaml.MappingNode) or node.tag not in _PLAIN_TAGS:
        raise ValueError(f"item {number} is {_short(_text_of(node))}; give it keys: {', '.join(leaves)}")
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        if key not in leaves:
            near = nearest(key, leaves)
            hint = f"did you mean {_joined(near)}?" if near else f"known keys: {', '.join(leaves)}"
            raise ValueError(f"item {number} has an unknown key {_short(key)}; {hint}")
        if key in values:
            raise ValueError(f"item {number} has {key} twice; keep one")
        values[key] = _usable(_from_node(value_node, leaf=leaves[key]), leaf=leaves[key])
    return values


def _from_text(text: str, *, leaf: _Leaf) -> Any:
    """Converts a plain scalar to the type of its key; unreadable text stays text, and the schema refuses it."""
    if leaf.kind is bool:
        return _SWITCH_WORDS.get(text.lower(), text)
    if leaf.takes_texts:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if text in leaf.words:
        return text
    try:
        value = _whole(text) if leaf.kind is int else float(text) if leaf.kind is float else text
    except ValueError:
        return text
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError(f"{_short(text)} is too large: whole numbers must be at most {_LARGEST}")
    return value


def _whole(text: str) -> int | float:
    try:
        return int(text, base=0)
    except ValueError:
        number = float(text)  # 1e6 is as whole as 1000000
        return int(number) if number.is_integer() else number


def _refused(node: yaml.Node) -> str:
    return f"the tag {_short(node.tag.replace(_TAG, '!!'))} is not allowed; give a plain value"


def _is_null(node: yaml.Node) -> bool:
    return node.tag == f"{_TAG}null"


def _is_quoted(node: yaml.ScalarNode) -> bool:
    return bool(node.style)


def _place_of(node: yaml.Node, *, source: Source) -> _Place:
    if node.start_mark is None:  # made from plain values, not read from a file
        return _Place(source=source)
    line = node.start_mark.line + 1
    return _Place(source=source, label=f"line {line}", line=line)


# --- wording -----------------------------------------------------------------------------------------------


def _rule(leaf: _Leaf, *, kind: str, limits: Mapping[str, Any], text: str) -> str:
    """The rule that a refused value broke."""
    bounds = {
        "greater_than": ("must be greater than", "gt"),
        "greater_than_equal": ("must be at least", "ge"),
        "less_than": ("must be less than", "lt"),
        "less_than_equal": ("must be at most", "le"),
    }
    if leaf.choices:
        near = nearest(text.strip("'\""), leaf.choices)
        return f"must be {leaf.wanted}" + (f"; did you mean {_joined(near)}?" if near else f" ({leaf.help})")
    if kind in bounds:
        words, limit = bounds[kind]
        return f"{words} {limits[limit]:.15g} ({leaf.help})"
    if kind == "finite_number":
        return f"must be a finite number ({leaf.help})"
    return f"must be {leaf.wanted} ({leaf.help})"


def _text_of(node: yaml.Node) -> str:
    """A node as the user wrote it."""
    if isinstance(node, yaml.ScalarNode):
        return "null" if _is_null(node) else repr(node.value) if _is_quoted(node) else node.value
    if isinstance(node, yaml.SequenceNode):
        items = [_text_of(item) if isinstance(item, yaml.ScalarNode) else "…" for item in node.value]
        return f"[{', '.join(items)}]"
    return "a mapping"


def _short(text: str) -> str:
    text = " ".join(text.split()) or repr(text)
    return text if len(text) <= _MAX_SHOWN_LENGTH else f"{text[:_MAX_SHOWN_LENGTH]}…"


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
