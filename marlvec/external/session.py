"""`Session`: one client's requests and episodes; it outlives broken connections.

`SlotQueue` says which client gets the next free slot; `ValueReaders` reads and writes values of all agents;
`WeightStore` keeps policies' weights in numbered versions, packed once for all clients.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from sys import getsizeof
from typing import Any, Generic, NamedTuple, TypeVar

from marlvec.envs.spec import EnvSpec
from marlvec.errors import (
    ArgumentError,
    BusyError,
    ClosedError,
    ConnectionLost,
    DriverGone,
    EpisodeOver,
    EpisodesFull,
    MarlvecError,
    ProtocolError,
    RefusedError,
    StateError,
)
from marlvec.external.connections import Connection
from marlvec.external.episode import EpisodeGateway, ExternalEpisode
from marlvec.external.exchange import Account, Limits
from marlvec.external.messages import (
    FORMS,
    EpisodeState,
    Message,
    MessageStream,
    Type,
    ValueReader,
    check_order,
    pack_plain,
    read_array,
    read_mask,
    read_message,
    write_space,
)


@dataclass(slots=True)
class SessionEpisode:
    """One episode of a session; `held`: number and undecoded bytes of held requests: decoded, they may be larger."""

    began: float
    heard: float  # when a message about it last came
    training: bool  # its rows go into batches
    slot: int | None  # the requested one; None: any
    re: int  # number of the unanswered request: ``begin`` or ``step``
    state: EpisodeState = EpisodeState.BEGINNING
    episode: ExternalEpisode | None = None  # once it has a slot
    held: deque[tuple[int, bytes]] = field(default_factory=deque)


REPORTS = frozenset({Type.STEP, Type.LOG, Type.RETURNS, Type.LEAVE, Type.END})
"""Messages that report something about an episode."""


def apply_report(
    episode: ExternalEpisode, message: Message, readers: ValueReaders, answer: Callable[[dict[str, Any]], None]
) -> None:
    """Apply a client's report, of `REPORTS`, to its episode. `answer` is called with actions that it requests.

    `ProtocolError`: an array is malformed. `RefusedError`: an agent is unknown, or not allowed in this field.
    `MarlvecError`: as the episode's own calls; nothing changed then.
    """
    fields, outcome = message.fields, readers.outcome(message.fields)
    if message.type is Type.RETURNS:
        episode.log_returns(**outcome)
        return
    obs = readers.obs(fields["obs"])
    if message.type is Type.END:
        episode.end(obs, truncated=fields["truncated"], **outcome)
    elif message.type is Type.LEAVE:
        terminated, truncated = set(fields["terminated"]), set(fields["truncated"])
        gone = dict.fromkeys([*fields["terminated"], *fields["truncated"]])
        if stray := [name for name in obs if name not in gone]:
            raise RefusedError(f"obs: expected last observations of ending agents, got those of {stray}", "value")
        episode.end_agents(
            {**gone, **obs},
            terminated={name: name in terminated for name in gone},
            truncated={name: name in truncated for name in gone},
            **outcome,
        )
    else:
        masks = readers.masks(fields.get("masks"))
        if message.type is Type.STEP:
            episode.ask(obs, answer=answer, masks=masks, **outcome)
        else:
            episode.log_action(obs, readers.actions(fields["actions"]), masks=masks, **outcome)


_REMEMBERED = 64  # ended episodes whose reason is kept
_EACH = 256  # overhead in bytes of a kept message
_EPISODE = 2048  # bytes of an episode without pending values
CLOSE_CODES = {"protocol": 1002, "version": 1002, "full": 1013, "closing": 1001}


class Session:
    """One client's requests and episodes, under a secret `key` with which it can be resumed."""

    def __init__(
        self,
        key: bytes,
        name: str,
        gateway: EpisodeGateway,
        readers: ValueReaders,
        weights: WeightStore,
        limits: Limits,
        clock: Callable[[], float],
        queue: SlotQueue[Session],
        account: Account,
    ) -> None:
        self.key, self.name = key, name
        self._gateway, self._readers, self._weights, self._limits = gateway, readers, weights, limits
        self._clock, self._queue, self.account = clock, queue, account
        self._lock = threading.RLock()
        self._stream = MessageStream(limits.kept_bytes, _EACH)
        self._running: dict[int, SessionEpisode] = {}
        self._newest = 0  # number of the newest episode: old numbers need not be remembered
        self._cut: OrderedDict[int, str] = OrderedDict()
        self._held_bytes = self._cut_bytes = 0
        self.unanswered = self.counted = 0  # unanswered requests, and the cost in bytes when last counted
        self.connection: Connection | None = None
        self.left: float | None = None  # when its last connection was lost
        self.over = self.is_leaving = False  # `is_leaving`: the client said goodbye, or was cut off

    def __repr__(self) -> str:
        return f"<Session of {self.name}: {len(self._running)} episodes>"

    @property
    def duplicates(self) -> int:
        """How many messages came twice."""
        return self._stream.duplicates

    @property
    def received(self) -> int:
        """Number of the last request that came."""
        return self._stream.received

    @property
    def cost(self) -> int:
        """Approximate bytes that it holds: unread, undecoded, uncollected and unsent."""
        connection = self.connection
        total = 0 if connection is None else connection.unsent_bytes + connection.read_bytes
        total += len(self._running) * _EPISODE + self._cut_bytes
        return total + self._held_bytes + self._stream.kept_bytes + self.account.pending + self.account.rows

    @property
    def is_held(self) -> bool:
        """Whether requests are held."""
        return self._held_bytes > 0

    # --- connections

    def attach(self, connection: Connection, welcome: bytes, received: int) -> None:
        """Continue the session over a connection: send `welcome`, then all replies after the last `received` one."""
        with self._lock:
            missing = self._stream.missing(received)
            connection.send_all([welcome, *missing], self._clock())
            self.connection, self.left = connection, None

    def detach(self) -> None:
        """Note that the connection is gone."""
        with self._lock:
            self.connection, self.left = None, self._clock()

    def end(self, reason: MarlvecError) -> None:
        """End the session: its episodes are lost."""
        with self._lock:
            self.over, self.connection = True, None
            running, self._running = self._running, {}
            self._held_bytes = 0
            for number, one in running.items():
                if one.episode is None:
                    self._queue.remove(self, number, one.slot)
                else:
                    one.episode.abandon(reason)

    def fail(self, code: str, text: str) -> None:
        """Send the client the reason, and begin to close. The thread that reads the connection ends the session."""
        with self._lock:
            if (connection := self.connection) is not None:
                connection.send(self._stream.make(Type.ERROR, {"code": code, "text": text}), self._clock())
                connection.end(CLOSE_CODES.get(code, 1008), code, self._clock())
            self.is_leaving = True

    # --- requests

    def receive(self, message: Message, data: bytes | bytearray) -> None:
        """Process one message and its bytes; after a `ProtocolError` the session is over."""
        with self._lock:
            if self.over or self.is_leaving or not self._stream.take(message):
                return
            if message.type is Type.PING:
                self._send(Type.PONG, {})
                return
            if not FORMS[message.type].is_numbered:
                if message.type is Type.PONG:
                    return
                raise ProtocolError(f"{message.type.name.lower()!r} came after the welcome")
            self.unanswered += 1
            if self.unanswered > self._limits.window:
                raise ProtocolError(f"more than {self._limits.window} requests are unanswered", "limit")
            running = self._running.get(message.fields.get("episode", -1))
            if running is not None and running.held and message.type is not Type.ABANDON:
                self._hold(running, message, data)
            else:
                self._try(message, data)

    def _hold(self, running: SessionEpisode, message: Message, data: bytes | bytearray) -> None:
        self._held_bytes += len(data) + _EACH
        running.held.append((message.number, bytes(data)))
        self._check_waiting()

    def _check_waiting(self) -> None:
        """Raise if too many bytes are held. Rows don't count: too many of them make requests wait."""
        if self._held_bytes + self.account.pending > self._limits.held_bytes:
            raise ProtocolError(f"more than {self._limits.held_bytes} bytes wait for the collector", "limit")

    def retry(self) -> None:
        """Retry held requests."""
        with self._lock:
            for running in [one for one in self._running.values() if one.held]:
                assert running.episode is not None  # only requests of running episodes are held
                if not running.episode.has_room:  # decoding held requests at each retry would cost too much
                    continue
                held, running.held = running.held, deque()
                while held and not running.held and running.episode.has_room:
                    _, data = held.popleft()
                    self._held_bytes -= len(data) + _EACH
                    self._try(read_message(data, "client"), data)
                running.held += held

    def _try(self, message: Message, data: bytes | bytearray) -> None:
        """Execute a request, refuse it, or hold it until the episode accepts a row."""
        re = message.number
        number = message.fields.get("episode", -1)
        if (running := self._running.get(number)) is not None:
            running.heard = self._clock()
        try:
            check_order(message, None if running is None else running.state)
            _DO[message.type](self, message)
        except RefusedError as error:
            text = self._cut.get(number, str(error)) if error.code == "episode" else str(error)
            self._refuse(re, error.code, text)
        except BusyError:
            assert running is not None  # only a running episode raises it
            self._hold(running, message, data)
        except (EpisodeOver, ClosedError) as error:
            self._forget(number, str(error))
            self._refuse(re, "episode", str(error))
        except StateError as error:
            self._refuse(re, "order", str(error))
        except ProtocolError:
            raise
        except MarlvecError as error:
            self._refuse(re, "value", str(error))

    def _begin(self, message: Message) -> None:
        fields, now = message.fields, self._clock()
        number, slot = fields["episode"], fields.get("slot")
        if number <= self._newest:
            raise RefusedError(f"episode {number} is not new: numbers must grow, the last was {self._newest}", "order")
        if len(self._running) >= self._limits.episodes:
            raise RefusedError(f"a client may have {self._limits.episodes} episodes at a time; end one first", "limit")
        if slot is not None and slot >= self._gateway.num_envs:
            raise ArgumentError(f"slot: no slot {slot} exists; slots are 0 to {self._gateway.num_envs - 1}")
        self._newest = number
        self._running[number] = SessionEpisode(now, now, fields["training"], slot, message.number)
        self._queue.add(self, number, slot)

    def begin(self, number: int) -> bool:
        """Begin an episode whose turn it is; return whether it no longer waits."""
        with self._lock:
            running = self._running[number]
            try:
                running.episode = self._gateway.begin(
                    training_enabled=running.training,
                    env_id=running.slot,
                    on_lost=lambda reason: self._lost(number, str(reason)),
                    account=self.account,
                )
            except EpisodesFull:  # another thread of this process was quicker
                return False
            except ClosedError as error:
                self._forget(number, str(error))
                self._refuse(running.re, "episode", str(error))
                return True
            if number not in self._running:  # already lost, and its client was told
                return True
            self._queue.remove(self, number, running.slot, served=True)
            running.heard = self._clock()
            running.state = EpisodeState.RUNNING
            self._send(Type.OK, {"re": running.re})
            return True

    def _apply_report(self, message: Message) -> None:
        number = message.fields["episode"]
        running = self._running[number]
        assert running.episode is not None  # `check_order` refuses reports before that
        apply_report(running.episode, message, self._readers, lambda actions: self._answer(number, actions))
        self._check_waiting()
        if message.type is Type.STEP:
            running.re = message.number
            running.state = EpisodeState.ASKED
            return
        if message.type is Type.END:
            if running.state is EpisodeState.ASKED:
                self._refuse(running.re, "episode", f"episode {number} was ended before the answer came")
            self._drop(number)
        self._send(Type.OK, {"re": message.number})

    def _answer(self, number: int, actions: Mapping[str, Any]) -> None:
        """Send the policies' actions; called from the collector's thread."""
        with self._lock:
            running = self._running.get(number)
            if running is not None and running.state is EpisodeState.ASKED:
                running.heard = self._clock()
                running.state = EpisodeState.RUNNING
                self._send(Type.ACTIONS, {"re": running.re, "actions": self._readers.write_actions(actions)})

    def _abandon(self, message: Message) -> None:
        self._give_up(
            message.fields["episode"], DriverGone(f"{self.name} abandoned it: {message.fields['reason'][:200]!r}")
        )
        self._send(Type.OK, {"re": message.number})

    def _fetch(self, message: Message) -> None:
        room = self._limits.kept_bytes // 2 - self._stream.kept_bytes
        kind, fields = self._weights.answer(message, room)
        self._send(kind, {"re": message.number, **fields})

    def _bye(self, message: Message) -> None:
        self._send(Type.OK, {"re": message.number})
        self.is_leaving = True
        if self.connection is not None:
            self.connection.end(1000, "", self._clock())

    # --- ends

    def _lost(self, number: int, reason: str) -> None:
        """Note that the collector's side has lost an episode; called from any thread."""
        with self._lock:
            running = self._running.get(number)
            if running is None:
                return
            was_due = running.state is not EpisodeState.RUNNING
            self._forget(number, reason)
            if was_due:
                self._refuse(running.re, "episode", reason)

    def _give_up(self, number: int, reason: MarlvecError) -> None:
        """Lose an episode on both sides."""
        episode = self._running[number].episode
        self._lost(number, str(reason))
        if episode is not None:
            episode.abandon(reason)

    def _drop(self, number: int) -> list[int]:
        """Remove an episode; return the numbers of its held requests."""
        running = self._running.pop(number, None)
        if running is not None and running.episode is None:
            self._queue.remove(self, number, running.slot)
        held = deque[tuple[int, bytes]]() if running is None else running.held
        self._held_bytes -= sum(len(data) + _EACH for _, data in held)
        return [re for re, _ in held]

    def _forget(self, number: int, reason: str) -> None:
        """Remove an episode before its client ended it; refuse later requests about it with the reason."""
        self._cut[number] = reason
        self._cut_bytes += getsizeof(reason)
        while len(self._cut) > _REMEMBERED:
            self._cut_bytes -= getsizeof(self._cut.popitem(last=False)[1])
        for re in self._drop(number):
            self._refuse(re, "episode", reason)

    def sweep(self) -> None:
        """Lose episodes past their deadlines."""
        now, limits = self._clock(), self._limits
        with self._lock:
            for number, running in list(self._running.items()):
                state = running.state
                if now - running.began > limits.episode_seconds and running.episode is not None:
                    text = f"episode {number} of {self.name} lasts longer than {limits.episode_seconds} s"
                elif state is EpisodeState.BEGINNING and now - running.began > limits.begin_seconds:
                    self._drop(number)
                    text = f"no slot became free for episode {number} within {limits.begin_seconds} s"
                    self._refuse(running.re, "full", text)
                    continue
                elif state is EpisodeState.RUNNING and not running.held and now - running.heard > limits.idle_seconds:
                    text = f"no message about episode {number} of {self.name} for {limits.idle_seconds} s"
                else:
                    continue
                self._give_up(number, ConnectionLost(text))

    # --- out

    def _refuse(self, re: int, code: str, text: str) -> None:
        self._send(Type.REFUSED, {"re": re, "code": code, "text": text[:4000]})

    def _send(self, kind: Type, fields: dict[str, Any]) -> None:
        if FORMS[kind].is_numbered:
            self.unanswered -= 1
        try:
            data = self._stream.make(kind, fields)
        except ProtocolError as error:  # the client confirms none of its replies
            self.fail(error.code, str(error))
            return
        if self.connection is not None:
            self.connection.send(data, self._clock())


_DO: dict[Type, Callable[[Session, Message], None]] = {
    Type.BEGIN: Session._begin,
    **dict.fromkeys(REPORTS, Session._apply_report),
    Type.ABANDON: Session._abandon,
    Type.WEIGHTS: Session._fetch,
    Type.PART: Session._fetch,
    Type.BYE: Session._bye,
}


Client = TypeVar("Client", bound=Hashable)


class _Turn:
    __slots__ = ("episodes", "order")

    def __init__(self, order: int) -> None:
        self.order = order  # clients with smaller numbers come first
        self.episodes: OrderedDict[int, None] = OrderedDict()  # numbers, the oldest first


class SlotQueue(Generic[Client]):
    """Episodes that wait for a slot. Used by the server's thread alone.

    There is a line for each slot that clients request by number, and one for any slot. In each line clients take turns,
    in order of arrival; after a turn a client goes to the end. A client's own episodes come in order of request. Every
    operation takes constant time, however many episodes wait.
    """

    def __init__(self) -> None:
        self._lines: dict[int | None, OrderedDict[Client, _Turn]] = {}
        self._next_turn = count()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __len__(self) -> int:
        return sum(len(turn.episodes) for line in self._lines.values() for turn in line.values())

    def add(self, client: Client, number: int, slot: int | None) -> None:
        """Queue a client's episode for a slot; None: any."""
        line = self._lines.setdefault(slot, OrderedDict())
        if client not in line:
            line[client] = _Turn(next(self._next_turn))
        line[client].episodes[number] = None

    def remove(self, client: Client, number: int, slot: int | None, *, served: bool = False) -> None:
        """Remove an episode. `served`: it got a slot, so that the client's turn is over."""
        line = self._lines[slot]
        turn = line[client]
        del turn.episodes[number]
        if served:
            turn.order = next(self._next_turn)
            line.move_to_end(client)
        if not turn.episodes:
            del line[client]
        if not line:
            del self._lines[slot]

    def first(self, free: Iterable[int]) -> tuple[Client, int] | None:
        """Return the next client and episode for one of the free slots; None if no client waits for one."""
        for slot in free:
            heads = [next(iter(self._lines[key].items())) for key in (None, slot) if key in self._lines]
            if heads:
                client, turn = min(heads, key=lambda head: head[1].order)
                return client, next(iter(turn.episodes))
        return None


class ValueReaders:
    """Values of all agents, by their declared spaces; immutable. `groups`: spaces as plain data, for the welcome.

    Reading raises `RefusedError`: an agent is unknown; `ContractError`: not its space's; `ProtocolError`: malformed.
    """

    def __init__(self, spec: EnvSpec, *, logs: bool = True) -> None:
        self._logs = logs
        self.agents = spec.agents
        self.groups: list[dict[str, Any]] = []
        self._obs: dict[str, ValueReader] = {}
        self._actions: dict[str, ValueReader] = {}
        for group in spec.groups:
            obs, action = ValueReader(group.observation_space), ValueReader(group.action_space)
            names = [spec.agents[a] for a in group.agents]
            self._obs |= dict.fromkeys(names, obs)
            self._actions |= dict.fromkeys(names, action)
            self.groups.append(
                {
                    "agents": names,
                    "observation": write_space(group.observation_space),
                    "action": write_space(group.action_space),
                    "mask": group.mask_size,
                }
            )

    def obs(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Unpack observations of some agents."""
        return self._read(self._obs, data, "observation")

    def actions(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Unpack actions of some agents; `RefusedError` if clients may not send their own actions."""
        if not self._logs:
            raise RefusedError("this server accepts no logged actions (logs=False)", "value")
        return self._read(self._actions, data, "action")

    def masks(self, data: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Unpack action masks of some agents."""
        if data is None:
            return None
        return {name: read_mask(mask, f"action mask of agent {name!r}") for name, mask in data.items()}

    def outcome(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Unpack a message's rewards and infos into arguments of an `ExternalEpisode`."""
        infos = fields.get("infos")
        if infos is not None:
            infos = {
                name: {key: read_array(value, key) if isinstance(value, list) else value for key, value in info.items()}
                for name, info in infos.items()
            }
        return {"rewards": fields.get("rewards"), "infos": infos}

    def write_actions(self, actions: Mapping[str, Any]) -> dict[str, Any]:
        """Pack actions of some agents."""
        return {name: self._actions[name].write(action) for name, action in actions.items()}

    def _read(self, readers: Mapping[str, ValueReader], data: Mapping[str, Any], what: str) -> dict[str, Any]:
        found = {}
        for name, value in data.items():
            reader = readers.get(name)
            if reader is None:
                raise RefusedError(f"no agent {name!r} exists; the agents are {list(self.agents)}"[:500], "value")
            found[name] = reader.read(value, f"{what} of agent {name!r}")
        return found


PART_BYTES = 2**20
_KEPT = 2  # versions: a client may finish fetching the previous one


class Package(NamedTuple):
    """One version of the weights, from 1, and its checksum."""

    version: int
    data: bytes
    sha256: bytes

    @property
    def parts(self) -> int:
        """Number of parts in which it is sent."""
        return -(-len(self.data) // PART_BYTES)

    def part(self, number: int) -> bytes:
        return self.data[number * PART_BYTES : (number + 1) * PART_BYTES]


class WeightStore:
    """The last versions of the weights. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._packages: list[Package] = []

    @property
    def version(self) -> int:
        """Number of the newest version; 0: none."""
        newest = self.newest()
        return 0 if newest is None else newest.version

    def newest(self) -> Package | None:
        """Return the newest version, or None."""
        with self._lock:
            return self._packages[-1] if self._packages else None

    def find(self, version: int) -> Package | None:
        """Return a version by its number; None if it is not kept."""
        with self._lock:
            return next((package for package in self._packages if package.version == version), None)

    def answer(self, message: Message, room: int) -> tuple[Type, dict[str, Any]]:
        """Answer a ``weights`` or ``part`` request, in `room` bytes at most.

        `RefusedError`: the part is not kept, or it is larger.
        """
        fields = message.fields
        if message.type is Type.WEIGHTS:
            package = self.newest()
            if package is None or package.version <= fields["have"]:
                return Type.OFFER, {"version": fields["have"], "size": 0, "parts": 0, "sha256": b""}
            size, parts = len(package.data), package.parts
            return Type.OFFER, {"version": package.version, "size": size, "parts": parts, "sha256": package.sha256}
        package = self.find(fields["version"])
        if package is None or fields["part"] >= package.parts:
            what = f"part {fields['part']} of weights {fields['version']}"
            raise RefusedError(f"{what} does not exist, or is no longer kept", "weights")
        data = package.part(fields["part"])
        if len(data) > room:
            raise RefusedError("too many bytes are unconfirmed; ask again", "limit")
        return Type.CHUNK, {"data": data}

    def add(self, content: Mapping[str, Any], version: int | None = None) -> int:
        """Add a version, by default the last plus one; return its number.

        `content`: texts to trees, see `marlvec.external.messages`; `SerialisationError` if one has no form
        there.
        """
        last = self.version
        number = last + 1 if version is None else version
        if number <= last:
            raise ArgumentError(f"version={version!r}: expected a number above {last}, the last one")
        data = pack_plain({"version": number, **content}, "weights")
        package = Package(number, data, hashlib.sha256(data).digest())
        with self._lock:
            self._packages = [*self._packages, package][-_KEPT:]
        return number
