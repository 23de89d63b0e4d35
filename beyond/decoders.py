"""What a system is decoded by, for pays.py and text.py: everything that its user could choose.

    no adapter, or a distilled Stage A    every rule of rules.py and of rule_steps.py, at each value of its dial
    a joint head      all masks are looked at, and tau_keep is the dial; or it is switched off, for the rule that goes
                      with the model's order, with a careful dial; and where the surest are written first, it looks at
                      those above tau_m2t alone
    Stage B           at every tau_m2t, and the same with Stage B off: a system of its own
    a sampling head   at several tau_m2t and `looks`
    left to right     (block_length 1) one token after the other

The rules are greedy. With a temperature sample.step's tau_m2t, in the model's own order, takes their place.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import evaluate
from beyond import rule_steps, rules
from beyond.costs import SHADOWS, VERIFICATION, Reading
from beyond.distill import Distilled
from model import Model
from sample import Decoding

GATES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01, -1.0)  # Stage B's tau_m2t
SAMPLED = (1.0, 0.9, 0.5, 0.2, 0.05, 0.005, -1.0)  # tau_m2t with a temperature
KEEP = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
LOOKS = (1, 8)  # of sampling_head.py
CAREFUL = 0.5  # dials of a joint head that is off, from here to 1
ABOVE = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)  # tau_m2t of a joint head that looks at some masks alone
KEEP_OF_THOSE = (0.0, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Setting:
    label: str
    decoding: Decoding
    step: Callable | None = None  # a rule's; None: the model's own
    attributes: dict[str, float] = field(default_factory=dict)  # of the model
    off: bool = False  # Stage B is off: a system of its own
    reading: Reading | None = None  # what the rule's step reads a second time


def settings(model: Model, adapter: str | None, args: Namespace) -> list[Setting]:
    """Everything that a system is decoded by, at each temperature, and with one at each top_p."""
    every = []
    greedy = Decoding(gen_length=evaluate.NAME_TOKENS, tau_t2t=None, n_rounds=0)
    for temperature in args.temperature:
        if temperature == 0:
            every += settings_of(model, adapter, greedy)
            continue
        for top_p in args.top_p:
            every += settings_of(model, adapter, replace(greedy, temperature=temperature, top_p=top_p))
    return every


def settings_of(model: Model, adapter: str | None, start: Decoding) -> list[Setting]:
    """By what the model is, at one temperature."""
    if model.cfg.block_length == 1:
        return [Setting("left to right", replace(start, tau_m2t=1.0))]
    if hasattr(model, "tau_keep"):
        return joint_head_settings(model, start)
    if hasattr(model, "looks"):
        return sampling_head_settings(model, start)
    if adapter is None or isinstance(model, Distilled):
        return stage_a_settings(model, start)
    return stage_b_settings(model, start)


def stage_a_settings(model: Model, start: Decoding) -> list[Setting]:
    """Every rule at each value of its dial; the rules are greedy."""
    if start.temperature > 0:
        return [Setting(f"tau_m2t {tau:g}", replace(start, tau_m2t=tau)) for tau in SAMPLED]
    dials = list(rules.DIALS.items())
    if model.cfg.block_length > 8:
        dials += rules.MORE_DIALS.items()
    every = [s for name, of_rule in dials for s in settings_of_rule(name, of_rule, start)]
    return every + settings_of_rule_steps(start)


def settings_of_rule_steps(start: Decoding) -> list[Setting]:
    """The rules that remember, take back, or read a second time."""
    # T2M judges once more after the last mask, as edits do: a gate of 1, which nothing passes, keeps a block open
    judging = replace(start, tau_t2t=1.0)
    every = []
    for dial in rule_steps.DIALS["klass"]:
        every.append(Setting(f"klass {dial:g}", start, rule_steps.klass(dial)))
    for dial in rule_steps.DIALS["wino"]:
        every.append(Setting(f"wino {dial:g}", start, rule_steps.wino(dial), reading=SHADOWS))
    for dial in rule_steps.DIALS["t2m"]:
        every.append(Setting(f"t2m {dial:g}", judging, rule_steps.t2m(dial)))
    every.append(Setting("s2d2", start, rule_steps.s2d2(), reading=VERIFICATION))
    return every


def settings_of_rule(name: str, dials: tuple[float, ...], start: Decoding) -> list[Setting]:
    rule = rules.RULES[name]
    return [Setting(f"{name} {dial:g}", start, rules.step_of(rule, dial)) for dial in dials]


def joint_head_settings(model: Model, start: Decoding) -> list[Setting]:
    """It looks at all masks, and tau_keep is the dial; or it is off, and the rule is careful."""
    on = replace(start, n_rounds=1, tau_m2t=-1.0)
    every = [Setting(f"tau_keep {keep:g}", on, attributes={"tau_keep": keep}) for keep in KEEP]
    if model.cfg.order == "surest" and start.temperature == 0:
        every += settings_that_look_at_some(start)

    # off, as its user may have it
    if start.temperature > 0:
        taus = [tau for tau in SAMPLED if tau >= CAREFUL]
        off = [Setting(f"tau_m2t {tau:g}", replace(start, tau_m2t=tau)) for tau in taus]
    else:
        rule = "threshold"
        if model.cfg.order == "leftmost":
            rule = "longest_prefix"
        careful = [dial for dial in rules.DIALS[rule] if dial >= CAREFUL]
        off = settings_of_rule(rule, careful, start)
    return every + [replace(setting, label=f"off, {setting.label}") for setting in off]


def settings_that_look_at_some(start: Decoding) -> list[Setting]:
    """The joint head looks at the masks above tau_m2t alone."""
    every = []
    for tau in ABOVE:
        d = replace(start, n_rounds=1, tau_m2t=tau)
        for keep in KEEP_OF_THOSE:
            every.append(Setting(f"tau_m2t {tau:g}, tau_keep {keep:g}", d, attributes={"tau_keep": keep}))
    return every


def sampling_head_settings(model: Model, start: Decoding) -> list[Setting]:
    """One at a time there is nothing to look at again."""
    every = []
    for looks in LOOKS:
        for tau in SAMPLED:
            if tau < 1:
                d = replace(start, n_rounds=1, tau_m2t=tau)
                every.append(Setting(f"tau_m2t {tau:g}, looks {looks}", d, attributes={"looks": looks}))
    return every


def stage_b_settings(model: Model, start: Decoding) -> list[Setting]:
    """On, and off with the same weights."""
    taus = GATES
    if start.temperature > 0:
        taus = SAMPLED
    off = [Setting(f"tau_m2t {tau:g}", replace(start, tau_m2t=tau), off=True) for tau in taus]
    on = [replace(s, decoding=replace(s.decoding, n_rounds=model.cfg.n_rounds), off=False) for s in off]
    return on + off


def set_up(model: Model, s: Setting, own_step: Callable) -> Callable:
    """Give the model what a setting wants of it -> the step that decodes it: the rule's, or the model's own."""
    for attribute, value in s.attributes.items():
        setattr(model, attribute, value)
    if s.step is None:
        return own_step
    return s.step
