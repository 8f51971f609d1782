"""The built-in env ids, and how to build the envs; no library is imported before an env is built."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium

from marlvec.envs.recipes import EnvEntry
from marlvec.envs.wrappers import SeedStream
from marlvec.errors import UnknownEnvError

# Families, which are namespaces of ids, too; JAX is that of users' own JAX worlds.
ENVPOOL = "envpool"
OPENSPIEL = "openspiel"
JAX = "jax"
JAXMARL = "jaxmarl"
JUMANJI = "jumanji"
PGX = "pgx"
TEXTARENA = "textarena"
VMAS = "vmas"

LIBRARIES = {
    ENVPOOL: ("marlvec.vector.pools.envpool_tasks:build", "task_id", "envpool"),
    OPENSPIEL: ("marlvec.envs.adapters.openspiel:OpenSpielEnv", "game", "pyspiel"),
    JAXMARL: ("marlvec.vector.pools.jax_suites:JaxMarlWorld", "env_id", "jaxmarl"),
    JUMANJI: ("marlvec.vector.pools.jax_suites:JumanjiWorld", "env_id", "jumanji"),
    PGX: ("marlvec.vector.pools.jax_suites:PgxWorld", "game", "pgx"),
    TEXTARENA: ("marlvec.envs.adapters.textarena:TextArenaEnv", "game", "textarena"),
    VMAS: ("marlvec.vector.pools.vmas:build", "scenario", "vmas"),
}
"""Families whose libraries have their own ids: entry point, name of the argument for the id, and required package."""

BRAX_ENVS = ("ant_4x2", "halfcheetah_6x1", "hopper_3x1", "humanoid_9|8", "walker2d_2x3")
"""Those of JaxMARL's envs that need Brax."""
_LONGEST_TEXT_GAME = 400  # answers: two of textarena's games never end once a player was put out
_LISTED = {
    JAXMARL: """
        MPE_simple_v3 MPE_simple_adversary_v3 MPE_simple_crypto_v3 MPE_simple_facmac_v1 MPE_simple_facmac_3a_v1
        MPE_simple_facmac_6a_v1 MPE_simple_facmac_9a_v1 MPE_simple_push_v3 MPE_simple_reference_v3
        MPE_simple_speaker_listener_v4 MPE_simple_spread_v3 MPE_simple_tag_v3 MPE_simple_world_comm_v3
        SMAX HeuristicEnemySMAX overcooked overcooked_v2 hanabi switch_riddle coin_game
    """
    + " ".join(BRAX_ENVS),
    JUMANJI: """
        Cleaner-v0 Connector-v3 LevelBasedForaging-v0 MMST-v0 MultiCVRP-v0 RobotWarehouse-v0 SearchAndRescue-v0
    """,
    PGX: """
        2048 animal_shogi backgammon chess connect_four gardner_chess go_9x9 go_19x19 hex kuhn_poker leduc_holdem
        othello shogi sparrow_mahjong tic_tac_toe
    """,
    TEXTARENA: """
        2048-v0 Alquerque-v0 Bandit-v0 Battleship-v0 Blackjack-v0 Breakthrough-v0 Briscola-v0 Checkers-v0 Chess-v0
        Chopsticks-v0 Codenames-v0 ColonelBlotto-v0 ConnectFour-v0 Countdown-v0 Crosswords-v0 Crusade-v0
        Cryptarithm-v0 DontSayIt-v0 FifteenPuzzle-v0 FrozenLake-v0 GameOfPureStrategy-v0 GermanWhist-v0 Golf-v0
        GuessTheNumber-v0 Hangman-v0 HighSociety-v0 IndianPoker-v0 IteratedMatchingPennies-v0
        IteratedPrisonersDilemma-v0 IteratedRockPaperScissors-v0 IteratedStagHunt-v0 IteratedTwoThirdsAverage-v0
        IteratedUltimatumGame-v0 KuhnPoker-v0 LetterAuction-v0 LiarsDice-v0 LightsOut-v0 LinesOfAction-v0
        LogicPuzzle-v0 MarketEntryGame-v0 Mastermind-v0 MemoryGame-v0 Minesweeper-v0 NewRecruit-v0 Nim-v0
        Othello-v0 PegJump-v0 PigDice-v0 Poker-v0 PublicGoodsGame-v0 QuantumTicTacToe-v0 ReverseTicTacToe-v0
        RushHour-v0 SantoriniBaseFixed-v0 SecretMafia-v0 Secretary-v0 Set-v0 SettlersOfCatan-v0
        SimpleBlindAuction-v0 SimpleNegotiation-v0 SimpleTak-v0 Slitherlink-v0 Snake-v0 Sokoban-v0
        SpellingBee-v0 SpiteAndMalice-v0 Stratego-v0 Sudoku-v0 Surround-v0 Taboo-v0 Tak-v0 ThreeCardMonte-v0
        ThreePlayerGOPS-v0 ThreePlayerIPD-v0 ThreePlayerTicTacToe-v0 TicTacToe-v0 TowerOfHanoi-v0
        TruthAndDeception-v0 TwoDollar-v0 UltimateTexasHoldem-v0 UltimateTicTacToe-v0 WildTicTacToe-v0
        WordChains-v0 WordLadder-v0 WordSearch-v0 Wordle-v0
    """,
}
"""Envs of libraries with their own ids, for lists alone: a short name never means one of these. textarena's: one of
each class that its wheel has whole, and that runs without a key of a model server."""

_MPE = """
    collect_treasure_v1 simple_v3 simple_adversary_v3 simple_crypto_v3 simple_formation_v1 simple_line_v1
    simple_push_v3 simple_reference_v3 simple_speaker_listener_v4 simple_spread_v3 simple_tag_v3
    simple_world_comm_v3
"""

# Per env: Parallel form if it has one, else AEC; and required packages besides pygame, which all need.
_CLASSIC = {
    "chess_v6": ("aec", "chess"),
    "connect_four_v3": ("aec",),
    "go_v5": ("aec",),
    "hanabi_v5": ("aec", "shimmy", "pyspiel"),
    "leduc_holdem_v4": ("aec", "rlcard"),
    "rps_v2": ("parallel",),
    "texas_holdem_no_limit_v6": ("aec", "rlcard"),
    "texas_holdem_v4": ("aec", "rlcard"),
    "tictactoe_v3": ("aec",),
}
_BUTTERFLY = {
    "cooperative_pong_v6": ("parallel",),
    "knights_archers_zombies_v11": ("parallel",),
    "pistonball_v6": ("parallel", "pymunk"),
}
_SISL = {"multiwalker_v9": ("parallel", "Box2D"), "pursuit_v5": ("parallel", "scipy")}
_ATARI = """
    basketball_pong_v3 boxing_v2 combat_plane_v2 combat_tank_v2 double_dunk_v3 entombed_competitive_v3
    entombed_cooperative_v3 flag_capture_v2 foozpong_v3 ice_hockey_v2 joust_v3 mario_bros_v3 maze_craze_v3
    othello_v3 pong_v3 quadrapong_v4 space_invaders_v2 space_war_v2 surround_v2 tennis_v3 video_checkers_v4
    volleyball_pong_v3 warlords_v3 wizard_of_wor_v3
"""

# marlvec's card games: native envs, which other backends use one by one.
_CARDS = {"kuhn_poker": "kuhn", "leduc_poker": "leduc"}

# Module of Gymnasium's own envs → marlvec's extra for them, and required packages.
_GYMNASIUM_NEEDS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "gymnasium.envs.box2d": ("box2d", ("Box2D", "pygame")),
    "gymnasium.envs.mujoco": (None, ("mujoco",)),
    "gymnasium.envs.phys2d": (None, ("jax",)),
    "gymnasium.envs.tabular": (None, ("jax",)),
}


def catalog() -> Iterator[EnvEntry]:
    """Yield every built-in env, except Gymnasium's, which are looked up in Gymnasium's own registry."""
    for name in _MPE.split():
        yield EnvEntry(f"mpe/{name}", f"mpe2.{name}:parallel_env", family="mpe", packages=("mpe2",))
    for family, needs in (("classic", _CLASSIC), ("butterfly", _BUTTERFLY), ("sisl", _SISL)):
        for name, (kind, *packages) in needs.items():
            yield _pettingzoo(family, name, kind, ("pettingzoo", "pygame", *packages))
    for name, module in _CARDS.items():
        entry_point = f"marlvec.native.games.{module}:single"
        yield EnvEntry(f"cards/{name}", entry_point, family="cards", extra="native", packages=("numba",))
    for name in _ATARI.split():
        yield _pettingzoo("atari", name, "parallel", ("pettingzoo", "pygame", "multi_agent_ale_py", "ale_py"))


def _pettingzoo(family: str, name: str, kind: str, packages: tuple[str, ...]) -> EnvEntry:
    builder: Callable[..., Any] = pettingzoo_env
    if family == "atari":
        builder = atari_env
    elif "pyspiel" in packages:
        builder = openspiel_env
    return EnvEntry(
        f"pettingzoo/{family}/{name}",
        partial(builder, f"{family}/{name}", kind),
        family=family,
        extra=family,
        packages=packages,
    )


def pettingzoo_env(env_id: str, kind: str, /, **kwargs: Any) -> Any:
    """Build one of PettingZoo's own envs, in exactly the version of its id, ``"classic/connect_four_v3"``.

    `kind`: ``"parallel"`` or ``"aec"``. `MissingExtraError` if PettingZoo or a package of the family is not installed.
    """
    family, _, name = env_id.partition("/")
    entry = EnvEntry(env_id, "", family=family, extra=family)
    try:
        pettingzoo = importlib.import_module("pettingzoo")
        if hasattr(pettingzoo, "make"):
            return pettingzoo.make(kind, env_id, **kwargs)
        # Before PettingZoo had a registry, there was one module per env and version.
        module = importlib.import_module(f"pettingzoo.{family}.{name}")
    except ImportError as error:
        raise entry.missing(error) from error
    except Exception as error:
        # pettingzoo.make wraps the ImportError of a missing package in its own error.
        if isinstance(error.__cause__, ImportError):
            raise entry.missing(error.__cause__) from error
        raise
    build = module.parallel_env if kind == "parallel" else module.env
    return build(**kwargs)


def atari_env(env_id: str, kind: str, /, **kwargs: Any) -> Any:
    """Build one of PettingZoo's Atari envs, by default with the game files of ale-py; see `pettingzoo_env`."""
    if "auto_rom_install_path" not in kwargs:
        found = importlib.util.find_spec("ale_py")
        if found is not None and found.origin is not None:
            kwargs["auto_rom_install_path"] = str(Path(found.origin).parent / "roms")
    try:
        return pettingzoo_env(env_id, kind, **kwargs)
    except OSError as error:
        if "auto_rom_install_path" in kwargs:
            raise
        raise EnvEntry(env_id, "", extra="atari").missing(error) from error


def openspiel_env(env_id: str, kind: str, /, **kwargs: Any) -> Any:
    """Build one of PettingZoo's envs of OpenSpiel games, in a `SeedStream`; see `pettingzoo_env`.

    Without it, half of all seeds raise (OpenSpiel takes 31 bits), and after a reset without a seed the cards cannot be
    reproduced by any seed.
    """
    env = pettingzoo_env(env_id, kind, **kwargs)
    return SeedStream(env)


def library_entry(family: str, name: str) -> EnvEntry:
    """Return the entry of an env of a library with its own ids: ``"Pong-v5"``, ``"go(board_size=5)"``, ``"balance"``.

    An unknown id raises when the env is built.
    """
    entry_point, argument, package = LIBRARIES[family]
    extra, packages = family, [package]
    if family == JAXMARL and name in BRAX_ENVS:
        extra, packages = "brax", [package, "brax"]
    return EnvEntry(
        f"{family}/{name}",
        entry_point,
        {argument: name},
        family=family,
        extra=extra,
        packages=tuple(packages),
        max_episode_steps=_LONGEST_TEXT_GAME if family == TEXTARENA else None,
    )


def listed_entries() -> list[EnvEntry]:
    """Return the entries of libraries' envs that are listed by name; `library_entry` accepts others, too."""
    return [library_entry(family, name) for family, names in _LISTED.items() for name in names.split()]


def gymnasium_entry(env_id: str) -> EnvEntry:
    """Return the entry of an env from Gymnasium's registry, by Gymnasium's own id."""
    spec = gymnasium.envs.registration.registry.get(env_id)
    module = spec.entry_point if spec is not None and isinstance(spec.entry_point, str) else ""
    found = (needs for prefix, needs in _GYMNASIUM_NEEDS.items() if module.startswith(prefix))
    extra, packages = next(found, (None, ()))
    return EnvEntry(
        f"gymnasium/{env_id}",
        partial(gymnasium_env, env_id),
        family="gymnasium",
        extra=extra,
        packages=("gymnasium", *packages),
    )


def gymnasium_env(env_id: str, /, **kwargs: Any) -> Any:
    """Build an env from Gymnasium's registry, by default without its checker, which costs time in every step."""
    try:
        return gymnasium.make(env_id, **{"disable_env_checker": True, **kwargs})
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise gymnasium_entry(env_id).missing(error) from error


@dataclass(frozen=True)
class _Family:
    entry_point: str
    package: str
    example: str
    form: str  # of all its ids, in words
    read: Callable[[str], dict[str, Any] | None]  # arguments of an id; None: no such id


_FORAGING = re.compile(
    r"Foraging(?P<grid>-grid)?(-(?P<sight>\d+)s)?-(?P<size>\d+)x(?P=size)-(?P<players>\d+)p-(?P<foods>\d+)f"
    r"(?P<coop>-coop)?(?P<ind>-ind)?(?P<pen>-pen)?-v3"
)


def _foraging(name: str) -> dict[str, Any] | None:
    """Return the arguments that ``lbforaging/__init__.py`` registers under such a name; any size, number and sight."""
    found = _FORAGING.fullmatch(name)
    if found is None:
        return None
    size = int(found["size"])
    return {
        "players": int(found["players"]),
        "min_player_level": 1,
        "max_player_level": 2,
        "min_food_level": 1,
        "max_food_level": 1 if found["ind"] else None,
        "field_size": (size, size),
        "max_num_food": int(found["foods"]),
        "sight": int(found["sight"] or size),
        "max_episode_steps": 50,
        "force_coop": bool(found["coop"]),
        "grid_observation": bool(found["grid"]),
        "penalty": 0.1 if found["pen"] else 0.0,
    }


_WAREHOUSE = re.compile(
    r"rware(?P<kind>-img|-imgdict)?(?P<north>-Nd)?(-(?P<sight>\d+)s)?"
    r"-((?P<size>tiny|small|medium|large)|(?P<rows>\d+)x(?P<columns>\d+))(-(?P<height>\d+)h)?-(?P<agents>\d+)ag"
    r"((?P<hard>-easy|-hard)|-(?P<requests>\d+)req-(?P<reward>indiv|global|twostage))?-v2"
)
_SIZES = {"tiny": (1, 3), "small": (2, 3), "medium": (2, 5), "large": (3, 5)}
_REQUESTS = {"-easy": 2.0, None: 1.0, "-hard": 0.5}
_KINDS = {None: "flattened", "-img": "image", "-imgdict": "image_dict"}
_REWARDS = {None: "individual", "indiv": "individual", "global": "global", "twostage": "two_stage"}


def _warehouse(name: str) -> dict[str, Any] | None:
    """Return the arguments that ``rware/__init__.py`` registers under such a name; any size, number and range."""
    found = _WAREHOUSE.fullmatch(name)
    if found is None or bool(found["size"]) == bool(found["requests"]):
        return None
    rows, columns = _SIZES[found["size"]] if found["size"] else (int(found["rows"]), int(found["columns"]))
    agents = int(found["agents"])
    return {
        "column_height": int(found["height"] or 8),
        "shelf_rows": rows,
        "shelf_columns": columns,
        "n_agents": agents,
        "msg_bits": 0,
        "sensor_range": int(found["sight"] or 1),
        "request_queue_size": int(found["requests"] or agents * _REQUESTS[found["hard"]]),
        "max_inactivity_steps": None,
        "max_steps": 500,
        "reward_type": _REWARDS[found["reward"]],
        "observation_type": _KINDS[found["kind"]],
        "image_observation_directional": not found["north"],
    }


GRIDS = {
    "lbf": _Family(
        "marlvec.envs.grids.foraging:ForagingEnv",
        "lbforaging",
        "Foraging-8x8-2p-3f-v3",
        "Foraging[-grid][-SIGHTs]-SIZExSIZE-PLAYERSp-FOODSf[-coop][-ind][-pen]-v3",
        _foraging,
    ),
    "overcooked": _Family(
        "marlvec.envs.grids.overcooked:OvercookedEnv",
        "overcooked_ai_py",
        "cramped_room",
        "LAYOUT, one of overcooked-ai's",
        lambda name: {"layout": name} if re.fullmatch(r"\w+", name) else None,
    ),
    "rware": _Family(
        "marlvec.envs.grids.warehouse:Warehouse",
        "rware",
        "rware-tiny-2ag-v2",
        "rware[-img|-imgdict][-Nd][-RANGEs]-SIZE[-HEIGHTh]-AGENTSag[-easy|-hard]-v2, or, in place of -SIZE … -hard, "
        "-ROWSxCOLUMNS-HEIGHTh-AGENTSag-REQUESTSreq-REWARD-v2",
        _warehouse,
    ),
}
"""Families whose ids are read, by their namespace."""


def grid_entry(family: str, name: str) -> EnvEntry:
    """Return the entry of an env whose id, e.g. ``"Foraging-8x8-2p-3f-v3"``, says how it is built."""
    known = GRIDS[family]
    kwargs = known.read(name)
    if kwargs is None:
        raise UnknownEnvError(
            f"unknown env {f'{family}/{name}'!r}: expected {family}/{known.form}, e.g. {family}/{known.example}"
        )
    return EnvEntry(
        f"{family}/{name}", known.entry_point, kwargs, family=family, extra=family, packages=(known.package,)
    )
