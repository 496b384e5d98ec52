"""Science: formulas of physics and chemistry with numbers, units, and multiple choice by letter."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from random import Random

from flatout.tasks.domains.made import ByLevel, Made, several

TOLERANCE = 0.01
LETTERS = "ABCD"
# Prefixes and units, in multiples of the second.
STEPS = (
    ("km", "m", 1000), ("m", "cm", 100), ("cm", "mm", 10), ("kg", "g", 1000), ("g", "mg", 1000), ("h", "min", 60),
    ("min", "s", 60), ("L", "mL", 1000), ("kJ", "J", 1000), ("kW", "W", 1000), ("days", "h", 24), ("kPa", "Pa", 1000),
)  # fmt: skip
# Atomic number and mass in g/mol.
ELEMENTS = {
    "hydrogen": (1, "H", 1.008), "helium": (2, "He", 4.003), "carbon": (6, "C", 12.011), "nitrogen": (7, "N", 14.007),
    "oxygen": (8, "O", 15.999), "fluorine": (9, "F", 18.998), "neon": (10, "Ne", 20.180), "sodium": (11, "Na", 22.990),
    "magnesium": (12, "Mg", 24.305), "aluminium": (13, "Al", 26.982), "silicon": (14, "Si", 28.085),
    "phosphorus": (15, "P", 30.974), "sulfur": (16, "S", 32.06), "chlorine": (17, "Cl", 35.45),
    "argon": (18, "Ar", 39.948), "potassium": (19, "K", 39.098), "calcium": (20, "Ca", 40.078),
}  # fmt: skip
COMPOUNDS = {
    "water": {"H": 2, "O": 1}, "carbon dioxide": {"C": 1, "O": 2}, "methane": {"C": 1, "H": 4},
    "ammonia": {"N": 1, "H": 3}, "glucose": {"C": 6, "H": 12, "O": 6}, "sodium chloride": {"Na": 1, "Cl": 1},
    "sulfuric acid": {"H": 2, "S": 1, "O": 4}, "calcium carbonate": {"Ca": 1, "C": 1, "O": 3},
    "ethanol": {"C": 2, "H": 6, "O": 1}, "magnesium oxide": {"Mg": 1, "O": 1},
}  # fmt: skip
# Quantities with their SI units.
UNITS = {
    "force": "newton", "energy": "joule", "power": "watt", "pressure": "pascal", "charge": "coulomb",
    "voltage": "volt", "resistance": "ohm", "frequency": "hertz", "current": "ampere", "temperature": "kelvin",
    "amount of substance": "mole", "mass": "kilogram", "length": "metre", "capacitance": "farad",
}  # fmt: skip
G, R = 9.81, 8.314
GAS = f"R = {R} J/(mol K), 0 degrees = 273 K."

Formula = Callable[[Random], tuple[str, float, str]]


def _convert(chance: Random, /, *, level: int) -> Made:
    large, small, factor = chance.choice(STEPS)
    n = chance.randint(1, 99)
    return _numeric(f"{n} {large} = ? {small}", n * factor, f"1 {large} = {factor} {small}." if level > 1 else "")


def _proportion(chance: Random, /, *, level: int) -> Made:
    """One multiplication or division with whole numbers: a small result."""
    a, b = chance.randint(2, 12), chance.randint(2, 9)
    text, value, steps = chance.choice(
        (
            (f"{a * b} m in {b} s. Speed in m/s?", a, f"{a * b} / {b} = {a}."),
            (f"Force on {b} kg at {a} m/s^2, in N?", a * b, f"{b} * {a} = {a * b}."),
            (f"{a} V at {b} A. Power in W?", a * b, f"{a} * {b} = {a * b}."),
            (f"{a * b} V across {b} ohm. Current in A?", a, f"{a * b} / {b} = {a}."),
            (f"{a * b} g in {b} mL. Density in g/mL?", a, f"{a * b} / {b} = {a}."),
            (f"{a} N over {b} m. Work in J?", a * b, f"{a} * {b} = {a * b}."),
        )
    )
    return _numeric(text, value, steps)


def _choice_of_unit(chance: Random, /, *, level: int) -> Made:
    quantities = several(chance, sorted(UNITS), 4)
    at = chance.randrange(4)
    options = [UNITS[quantity] for quantity in quantities]
    return _chosen(f"The SI unit of {quantities[at]}?", options, at, "")


def _choice_of_element(chance: Random, /, *, level: int) -> Made:
    names = several(chance, sorted(ELEMENTS), 4)
    at = chance.randrange(4)
    number, symbol, _ = ELEMENTS[names[at]]
    hint = f"has the atomic number {number}" if chance.random() < 0.5 else f"is {symbol}"
    return _chosen(f"Which element {hint}?", names, at, "")


def _choice_of_number(chance: Random, /, *, level: int) -> Made:
    """A computed value among four, which differ by powers of two."""
    text, value, steps = chance.choice(FORMULAS[level - 2])(chance)
    shown = [_short(value * factor) for factor in several(chance, (0.5, 1.0, 2.0, 4.0), 4)]
    return _chosen(text, shown, shown.index(_short(value)), steps)


def _formula(chance: Random, /, *, level: int) -> Made:
    text, value, steps = chance.choice(FORMULAS[level - 2])(chance)
    return _numeric(text, value, steps)


# -- level 2: one formula ------------------------------------------------------------------------------------


def _weight(chance: Random) -> tuple[str, float, str]:
    m = chance.randint(2, 80)
    return f"What is the weight of {m} kg in N? g = {G} m/s^2.", m * G, f"{m} * {G} = {_short(m * G)}."


def _kinetic(chance: Random) -> tuple[str, float, str]:
    m, v = chance.randint(2, 40), chance.randint(2, 20)
    steps = f"{v}^2 = {v * v}. {m} * {v * v} / 2 = {_short(m * v * v / 2)}."
    return f"A body of {m} kg moves at {v} m/s. What is its kinetic energy in J?", m * v * v / 2, steps


def _charge(chance: Random) -> tuple[str, float, str]:
    i, t = chance.randint(2, 15), chance.randint(5, 90)
    return f"A current of {i} A flows for {t} s. What is the charge in C?", i * t, f"{i} * {t} = {i * t}."


# -- level 3: with a second step -----------------------------------------------------------------------------


def _molar_mass(chance: Random) -> tuple[str, float, str]:
    name = chance.choice(sorted(COMPOUNDS))
    n = chance.randint(2, 20)
    mass, said = _mass_of(name)
    steps = f"{said} {n} * {_short(mass)} = {_short(n * mass)}."
    return f"What is the mass of {n} mol of {name} ({_written(name)}) in g? {_masses(name)}", n * mass, steps


def _fall(chance: Random) -> tuple[str, float, str]:
    t = chance.randint(2, 9)
    h = chance.randint(1, 30)
    drop = G * t * t / 2
    steps = f"{G} * {t}^2 / 2 = {_short(drop)}. {_short(drop)} + {h} = {_short(drop + h)}."
    text = f"A stone falls from rest for {t} s and stops {h} m above the ground. How high was it at first, in m?"
    return f"{text} g = {G} m/s^2.", drop + h, steps


def _heat(chance: Random) -> tuple[str, float, str]:
    m, a = chance.randint(2, 30), chance.randint(10, 40)
    b = a + chance.randint(5, 50)
    q = m * 4.18 * (b - a)
    steps = f"{b} - {a} = {b - a}. {m} * 4.18 * {b - a} = {_short(q)}."
    return f"How much heat in kJ warms {m} kg of water from {a} to {b} degrees? c = 4.18 kJ/(kg K).", q, steps


# -- level 4: several steps ----------------------------------------------------------------------------------


def _parallel(chance: Random) -> tuple[str, float, str]:
    a, b, c, u = (chance.randint(2, 60) for _ in range(4))
    pair = a * b / (a + b)
    total = pair + c
    steps = (
        f"{a} * {b} / ({a} + {b}) = {_short(pair)}. {_short(pair)} + {c} = {_short(total)}. {u} / {_short(total)} = "
    )
    text = f"{a} ohm and {b} ohm in parallel are in series with {c} ohm at {u} V. What is the total current in A?"
    return text, u / total, f"{steps}{_short(u / total)}."


def _gas(chance: Random) -> tuple[str, float, str]:
    n, t, v = chance.randint(1, 9), chance.randint(5, 95), chance.randint(5, 60)
    p = n * R * (t + 273) / v
    steps = f"{t} + 273 = {t + 273}. {n} * {R} * {t + 273} = {_short(p * v)}. {_short(p * v)} / {v} = {_short(p)}."
    text = f"{n} mol of an ideal gas fill {v} L at {t} degrees Celsius. What is the pressure in kPa?"
    return f"{text} {GAS}", p, steps


def _solution(chance: Random) -> tuple[str, float, str]:
    name = chance.choice(sorted(COMPOUNDS))
    grams, volume = chance.randint(5, 90), chance.randint(1, 20) * 50
    mass, said = _mass_of(name)
    moles = grams / mass
    value = moles / (volume / 1000)
    steps = f"{said} {grams} / {_short(mass)} = {_short(moles)}. {_short(moles)} / {volume / 1000} = {_short(value)}."
    text = f"{grams} g of {name} ({_written(name)}) are dissolved to {volume} mL. What is the concentration in mol/L?"
    return f"{text} {_masses(name)}", value, steps


# -- level 5: longer ways ------------------------------------------------------------------------------------


def _slope(chance: Random) -> tuple[str, float, str]:
    m, h, share, d = chance.randint(2, 50), chance.randint(5, 40), chance.randint(10, 60), chance.randint(1, 9)
    energy = m * G * h
    left = energy * (1 - share / 100)
    value = left / d
    steps = (
        f"{m} * {G} * {h} = {_short(energy)}. {100 - share} % of it is {_short(left)}. "
        f"{_short(left)} / {d} = {_short(value)}."
    )
    text = (
        f"A sled of {m} kg slides from rest down a hill of {h} m and loses {share} % of its energy to friction. A "
        f"constant force then stops it within {d} m of level ground. How large is the force in N? g = {G} m/s^2."
    )
    return text, value, steps


def _mixture(chance: Random) -> tuple[str, float, str]:
    (m, n), hot, cold = several(chance, range(2, 30), 2), chance.randint(50, 95), chance.randint(5, 30)
    middle = (m * hot + n * cold) / (m + n)
    heat = m * 4.18 * (hot - middle)
    steps = (
        f"({m} * {hot} + {n} * {cold}) / {m + n} = {_short(middle)}. {hot} - {_short(middle)} = "
        f"{_short(hot - middle)}. {m} * 4.18 * {_short(hot - middle)} = {_short(heat)}."
    )
    text = (
        f"{m} kg of water at {hot} degrees are mixed with {n} kg of water at {cold} degrees, without losses. How much "
        "heat in kJ does the hot water give away? c = 4.18 kJ/(kg K)."
    )
    return text, heat, steps


def _burning(chance: Random) -> tuple[str, float, str]:
    grams, t = chance.randint(8, 99), chance.randint(10, 90)
    mass, said = _mass_of("methane")
    moles = grams / mass
    volume = moles * R * (t + 273) / 101.3
    steps = (
        f"{said} {grams} / {_short(mass)} = {_short(moles)} mol of each. {t} + 273 = {t + 273}. "
        f"{_short(moles)} * {R} * {t + 273} / 101.3 = {_short(volume)}."
    )
    text = (
        f"{grams} g of methane burn by CH4 + 2 O2 -> CO2 + 2 H2O. How many L of carbon dioxide arise at {t} degrees "
        f"Celsius and 101.3 kPa? {GAS} {_masses('methane')}"
    )
    return text, volume, steps


FORMULAS: tuple[tuple[Formula, ...], ...] = (
    (_weight, _kinetic, _charge),
    (_molar_mass, _fall, _heat),
    (_parallel, _gas, _solution),
    (_slope, _mixture, _burning),
)


def _mass_of(name: str) -> tuple[float, str]:
    masses = {symbol: mass for _, symbol, mass in ELEMENTS.values()}
    parts = COMPOUNDS[name]
    total = sum(n * masses[symbol] for symbol, n in parts.items())
    return total, f"{' + '.join(f'{n} * {masses[symbol]}' for symbol, n in parts.items())} = {_short(total)}."


def _masses(name: str) -> str:
    masses = {symbol: mass for _, symbol, mass in ELEMENTS.values()}
    return f"In g/mol: {', '.join(f'{symbol} {masses[symbol]}' for symbol in COMPOUNDS[name])}."


def _written(name: str) -> str:
    return "".join(f"{symbol}{n if n > 1 else ''}" for symbol, n in COMPOUNDS[name].items())


def _numeric(text: str, value: float, steps: str) -> Made:
    gold = {"value": float(_short(value)), "tolerance": TOLERANCE}
    return Made(text=text, gold=gold, verifier="number", steps=steps, answer=_short(value))


def _chosen(question: str, options: list[str], right: int, steps: str) -> Made:
    shown = " ".join(f"{letter}) {option}" for letter, option in zip(LETTERS, options, strict=True))
    return Made(text=f"{question} {shown}", gold=LETTERS[right], verifier="letter", steps=steps)


def _short(value: float) -> str:
    """Five digits, never with an exponent."""
    return format(Decimal(f"{value:.5g}"), "f")


make = ByLevel(
    [_convert, _proportion, _choice_of_unit],
    [_formula, _proportion, _choice_of_element, _choice_of_number],
    [_formula, _formula, _choice_of_number],
    [_formula, _formula, _choice_of_number],
    [_formula, _formula, _choice_of_number],
)
