/**
 * A client for marlvec's external environments: one file, no dependencies, any browser of today, and Node 22. Node 20
 * has no WebSocket: start it with `--experimental-websocket`, or give one, e.g. that of the package `ws`, to `connect`.
 *
 * Your page is the simulator. It begins episodes, says what each agent observes, and gets what each agent does:
 *
 *     import { connect } from "./marlvec.js";
 *
 *     const client = await connect("ws://127.0.0.1:8765/");
 *     const episode = await client.begin();
 *     const { player_0: column } = await episode.step({ player_0: board }, { masks: { player_0: legal } });
 *     await episode.end({ player_0: board, player_1: mirrored }, { rewards: { player_0: 1, player_1: -1 } });
 *     await client.close();
 *
 * The protocol is described in docs/protocol.md, "Over a socket". Everything that can go wrong is a `MarlvecError`
 * with a `code`: those of the protocol's tables, and "closed" for a connection that is gone for good.
 *
 * Observations and actions follow the spaces that the server sends (`client.spaces`):
 * Discrete: a number. Box, MultiDiscrete, MultiBinary: a flat (typed) array in row-major order, or a nested one.
 * Dict: an object. Tuple: an array. What arrives as an array is a typed array with a `shape`.
 */

const VERSION = 1;
const HEADER = 24;
const TYPES = {
  hello: 1, challenge: 2, auth: 3, welcome: 4, error: 5, ping: 6, pong: 7,
  begin: 16, step: 17, log: 18, returns: 19, leave: 20, end: 21, abandon: 22, weights: 23, part: 24, bye: 25,
  ok: 32, actions: 33, offer: 34, chunk: 35, refused: 36,
};
const NAMES = Object.fromEntries(Object.entries(TYPES).map(([name, type]) => [type, name]));
const ARRAYS = {
  bool: Uint8Array, int8: Int8Array, int16: Int16Array, int32: Int32Array, int64: BigInt64Array,
  uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array,
  float32: Float32Array, float64: Float64Array,
};

/** What went wrong, with the protocol's `code` for it. */
export class MarlvecError extends Error {
  constructor(code, text) {
    super(text);
    this.name = "MarlvecError";
    this.code = code;
  }
}

// --- msgpack: what of it the protocol uses ---------------------------------------------------------------------------

class Writer {
  constructor() {
    this.bytes = new Uint8Array(256);
    this.view = new DataView(this.bytes.buffer);
    this.size = 0;
  }

  room(count) {
    if (this.size + count > this.bytes.length) {
      const larger = new Uint8Array(Math.max(2 * this.bytes.length, this.size + count));
      larger.set(this.bytes);
      this.bytes = larger;
      this.view = new DataView(larger.buffer);
    }
    const at = this.size;
    this.size += count;
    return at;
  }

  byte(value) {
    this.view.setUint8(this.room(1), value);
  }

  /** The head of a text, of bytes, an array or a map: in the shortest form there is. */
  head(count, short, limit, longer) {
    if (count < limit) this.byte(short | count);
    else if (longer[0] && count < 2 ** 8) (this.byte(longer[0]), this.byte(count));
    else if (count < 2 ** 16) (this.byte(longer[1]), this.view.setUint16(this.room(2), count));
    else (this.byte(longer[2]), this.view.setUint32(this.room(4), count));
  }

  raw(bytes) {
    const at = this.room(bytes.length);
    this.bytes.set(bytes, at);
  }

  number(value) {
    if (!Number.isSafeInteger(value) || Object.is(value, -0)) (this.byte(0xcb), this.view.setFloat64(this.room(8), value));
    else if (value >= 0 && value < 2 ** 7) this.byte(value);
    else if (value < 0 && value >= -(2 ** 5)) this.byte(value + 256);
    else (this.byte(0xd3), this.view.setBigInt64(this.room(8), BigInt(value)));
  }

  write(value) {
    if (value === null || value === undefined) this.byte(0xc0);
    else if (value === false) this.byte(0xc2);
    else if (value === true) this.byte(0xc3);
    else if (typeof value === "number") this.number(value);
    else if (typeof value === "string") {
      const bytes = new TextEncoder().encode(value);
      this.head(bytes.length, 0xa0, 32, [0xd9, 0xda, 0xdb]);
      this.raw(bytes);
    } else if (value instanceof Uint8Array) {
      this.head(value.length, 0, 0, [0xc4, 0xc5, 0xc6]);
      this.raw(value);
    } else if (Array.isArray(value)) {
      this.head(value.length, 0x90, 16, [0, 0xdc, 0xdd]);
      for (const item of value) this.write(item);
    } else if (typeof value === "object") {
      const entries = Object.entries(value).filter(([, item]) => item !== undefined);
      this.head(entries.length, 0x80, 16, [0, 0xde, 0xdf]);
      for (const [key, item] of entries) (this.write(key), this.write(item));
    } else throw new MarlvecError("value", `a ${typeof value} cannot be sent`);
  }
}

class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.at = 0;
  }

  take(count) {
    const at = this.at;
    this.at += count;
    if (this.at > this.bytes.length) throw new MarlvecError("protocol", "a message ends too early");
    return at;
  }

  length(size) {
    const at = this.take(size);
    return size === 1 ? this.view.getUint8(at) : size === 2 ? this.view.getUint16(at) : this.view.getUint32(at);
  }

  text(count) {
    const at = this.take(count);
    return new TextDecoder("utf-8", { fatal: true }).decode(this.bytes.subarray(at, at + count));
  }

  data(count) {
    const at = this.take(count);
    return this.bytes.slice(at, at + count);  // a copy: aligned, for typed arrays over it
  }

  array(count) {
    const items = [];
    for (let k = 0; k < count; k++) items.push(this.read());
    return items;
  }

  map(count) {
    const found = {};
    for (let k = 0; k < count; k++) {
      const key = this.read();
      // defineProperty, as a key may be "__proto__"
      Object.defineProperty(found, key, { value: this.read(), enumerable: true, configurable: true, writable: true });
    }
    return found;
  }

  whole(big) {
    return Number.isSafeInteger(Number(big)) ? Number(big) : big;
  }

  read() {
    const head = this.view.getUint8(this.take(1));
    if (head < 0x80) return head;
    if (head < 0x90) return this.map(head & 15);
    if (head < 0xa0) return this.array(head & 15);
    if (head < 0xc0) return this.text(head & 31);
    if (head >= 0xe0) return head - 256;
    switch (head) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: return this.data(this.length(1));
      case 0xc5: return this.data(this.length(2));
      case 0xc6: return this.data(this.length(4));
      case 0xca: return this.view.getFloat32(this.take(4));
      case 0xcb: return this.view.getFloat64(this.take(8));
      case 0xcc: return this.view.getUint8(this.take(1));
      case 0xcd: return this.view.getUint16(this.take(2));
      case 0xce: return this.view.getUint32(this.take(4));
      case 0xcf: return this.whole(this.view.getBigUint64(this.take(8)));
      case 0xd0: return this.view.getInt8(this.take(1));
      case 0xd1: return this.view.getInt16(this.take(2));
      case 0xd2: return this.view.getInt32(this.take(4));
      case 0xd3: return this.whole(this.view.getBigInt64(this.take(8)));
      case 0xd9: return this.text(this.length(1));
      case 0xda: return this.text(this.length(2));
      case 0xdb: return this.text(this.length(4));
      case 0xdc: return this.array(this.length(2));
      case 0xdd: return this.array(this.length(4));
      case 0xde: return this.map(this.length(2));
      case 0xdf: return this.map(this.length(4));
    }
    throw new MarlvecError("protocol", `0x${head.toString(16)} is nothing that the protocol uses`);
  }
}

// --- messages and values ---------------------------------------------------------------------------------------------

function putNumber(view, at, number) {
  view.setUint32(at, Math.floor(number / 2 ** 32));
  view.setUint32(at + 4, number % 2 ** 32);
}

const getNumber = (view, at) => view.getUint32(at) * 2 ** 32 + view.getUint32(at + 4);

function packMessage(name, fields, number, received) {
  const writer = new Writer();
  writer.room(HEADER);
  writer.view.setUint16(0, 0x6d76);
  writer.view.setUint8(2, VERSION);
  writer.view.setUint8(3, TYPES[name]);
  putNumber(writer.view, 8, number);
  putNumber(writer.view, 16, received);
  writer.write(fields);
  return writer.bytes.slice(0, writer.size);
}

function unpackMessage(buffer) {
  const bytes = new Uint8Array(buffer);
  const view = new DataView(buffer);
  if (bytes.length < HEADER || view.getUint16(0) !== 0x6d76 || view.getUint8(2) !== VERSION)
    throw new MarlvecError("protocol", `this is no message of version ${VERSION} of marlvec's protocol`);
  const reader = new Reader(bytes.subarray(HEADER));
  const fields = reader.read();
  if (reader.at !== reader.bytes.length) throw new MarlvecError("protocol", "a message goes on after its end");
  return { name: NAMES[view.getUint8(3)], number: getNumber(view, 8), received: getNumber(view, 16), fields };
}

const product = (shape) => shape.reduce((all, side) => all * side, 1);

/** Shape and dtype of a space's leaf. */
function leafOf(space) {
  switch (space.space) {
    case "box": return space;
    case "discrete": return { dtype: space.dtype, shape: [] };
    case "multi_discrete": return { dtype: space.nvec[0], shape: space.nvec[1] };
    case "multi_binary": return { dtype: "int8", shape: [space.n].flat() };
  }
  throw new MarlvecError("value", `there is no space called ${space.space}`);
}

function encodeArray(dtype, shape, value) {
  const items = ArrayBuffer.isView(value) ? value : [value].flat(Infinity);
  const Form = ARRAYS[dtype];
  if (!Form) throw new MarlvecError("value", `this client does not know arrays of ${dtype}`);
  if (items.length !== product(shape))
    throw new MarlvecError("value", `expected ${product(shape)} numbers for shape [${shape}], got ${items.length}`);
  const big = Form === BigInt64Array || Form === BigUint64Array;
  const array = items instanceof Form ? items : Form.from(items, big ? BigInt : Number);
  return [dtype, shape, new Uint8Array(array.buffer, array.byteOffset, array.byteLength)];
}

function decodeArray([dtype, shape, bytes]) {
  const Form = ARRAYS[dtype];
  if (!Form) throw new MarlvecError("value", `this client does not know arrays of ${dtype}`);
  return Object.assign(new Form(bytes.buffer, 0, product(shape)), { shape });
}

/** Goes through a value beside its space. */
function walk(space, value, leaf) {
  if (space.space === "dict") {
    return Object.fromEntries(space.items.map(([key, sub]) => {
      if (value?.[key] === undefined) throw new MarlvecError("value", `expected a value for the key "${key}"`);
      return [key, walk(sub, value[key], leaf)];
    }));
  }
  if (space.space === "tuple") return space.items.map((sub, k) => walk(sub, value[k], leaf));
  return leaf(leafOf(space), value);
}

const encode = (space, value) => walk(space, value, ({ dtype, shape }, given) => {
  if (shape.length) return encodeArray(dtype, shape, given);
  return dtype === "bool" ? Boolean(given) : Number(given);
});

const decode = (space, value) => walk(space, value, ({ shape }, given) => (shape.length ? decodeArray(given) : given));

// --- one connection --------------------------------------------------------------------------------------------------

async function hmac(token, role, host, server, own, theirs) {
  const text = new TextEncoder();
  const key = await crypto.subtle.importKey("raw", text.encode(token), { name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
  const said = [...text.encode(`marlvec/1 ${role}`), 0, ...text.encode(host), 0, ...server, ...own, ...theirs];
  return new Uint8Array(await crypto.subtle.sign("HMAC", key, new Uint8Array(said)));
}

const equal = (a, b) => a.length === b.length && a.every((byte, k) => byte === b[k]);

/** Opens a WebSocket and does the handshake. Resolves to the socket, the welcome, and whatever came right after it. */
function shakeHands(url, { token, name, session, received, WebSocket = globalThis.WebSocket }) {
  if (!WebSocket)
    throw new MarlvecError("request", "there is no WebSocket here: start Node 20 with --experimental-websocket, or give "
      + 'one, e.g. import WebSocket from "ws" and connect(url, { WebSocket })');
  const host = new URL(url).host.toLowerCase();
  const nonce = crypto.getRandomValues(new Uint8Array(32));
  const socket = new WebSocket(url, "marlvec.v1");
  socket.binaryType = "arraybuffer";
  let proofOf = null;

  const answer = async ({ name: kind, fields }) => {
    if (kind === "error") throw new MarlvecError(fields.code, fields.text);
    if (kind === "challenge") {
      if (fields.wants_token !== Boolean(token))
        throw new MarlvecError("token", token ? "the server asks for no token: it may be another one" : "the server asks for a token");
      proofOf = (role) => hmac(token, role, host, fields.server, nonce, fields.nonce);
      const proof = token ? await proofOf("client") : new Uint8Array();
      socket.send(packMessage("auth", { proof, session }, 0, received));
    } else if (kind === "welcome") {
      if (token && !equal(await proofOf("server"), fields.proof))
        throw new MarlvecError("token", "the server does not know the token");
      return true;
    } else throw new MarlvecError("protocol", `did not expect "${kind}" in the handshake`);
    return false;
  };

  return new Promise((resolve, reject) => {
    const fail = (error) => (socket.close(), reject(error));
    const early = [];  // what comes while a promise of ours is still to be settled
    let welcome = null;
    socket.onopen = () => socket.send(packMessage("hello", { versions: [VERSION], features: [], name, nonce }, 0, 0));
    socket.onclose = () => reject(new MarlvecError("closed", `${url} does not answer, or hung up`));
    socket.onmessage = async ({ data }) => {
      try {
        const message = unpackMessage(data);
        if (welcome) early.push(data);
        else {
          if (message.name === "welcome") welcome = message;
          if (await answer(message)) resolve({ socket, welcome, early });
        }
      } catch (error) {
        fail(error);
      }
    };
  });
}

/** One episode; made by `client.begin`. */
class Episode {
  constructor(client, number) {
    this.client = client;
    this.number = number;
  }

  /**
   * Ask what these agents do.
   *
   * @param obs agent → observation, of those that are to act.
   * @param more `masks`: agent → list of bools, what it may do; `rewards`: agent → its reward since its last
   *     observation; `infos`: agent → object.
   * @returns agent → action.
   */
  async step(obs, more = {}) {
    const { actions } = await this.client.request("step", { ...this.fields(obs, more), masks: masksOf(more.masks) });
    return this.client.values("action", actions, decode);
  }

  /** Send what these agents did, which were not asked: a person's moves, say. Arguments as in `step`. */
  async log(obs, actions, more = {}) {
    const done = this.client.values("action", actions, encode);
    await this.client.request("log", { ...this.fields(obs, more), actions: done, masks: masksOf(more.masks) });
  }

  /** Send rewards alone. */
  async returns(rewards, infos) {
    await this.client.request("returns", { episode: this.number, rewards, infos });
  }

  /** These agents leave, the others go on. `obs`: their last observations. */
  async leave(obs, { terminated = [], truncated = [], ...more } = {}) {
    await this.client.request("leave", { ...this.fields(obs, more), terminated, truncated });
  }

  /** It is over for all that are left: for good, or as a time limit. `obs`: their last observations. */
  async end(obs, { truncated = false, ...more } = {}) {
    await this.client.request("end", { ...this.fields(obs, more), truncated });
  }

  /** It is lost: its rows are not used. May be said at any time. */
  async abandon(reason) {
    await this.client.request("abandon", { episode: this.number, reason });
  }

  fields(obs, { rewards, infos }) {
    return { episode: this.number, obs: this.client.values("observation", obs ?? {}, encode), rewards, infos };
  }
}

const masksOf = (masks) => masks && Object.fromEntries(
  Object.entries(masks).map(([agent, mask]) => [agent, encodeArray("bool", [mask.length], mask)]));

/** A session with a server; made by `connect`. It outlives its connection, as long as the server keeps it. */
export class Client {
  constructor(url, options, { socket, welcome, early }) {
    this.url = url;
    this.options = options;
    this.sent = this.received = this.episodes = 0;
    this.pending = new Map();  // number → {bytes, resolve, reject, isSent}
    this.waiting = [];  // for a place in the window
    this.lost = null;  // why nothing can be asked any more
    this.welcome(welcome);
    this.listen(socket, early);
  }

  /** Agent names, in order. */
  get agents() {
    return Object.keys(this.spaces);
  }

  /** Begin an episode. `training`: whether its rows get into batches. */
  async begin({ training = true } = {}) {
    const number = ++this.episodes;
    await this.request("begin", { episode: number, training });
    return new Episode(this, number);
  }

  /** Give up the session, and hang up. */
  async close() {
    if (this.lost) return;
    await this.request("bye", {}).catch(() => {});
    this.fail(new MarlvecError("closed", "this client was closed"));
  }

  // What follows is for the classes of this file.

  values(side, given, change) {
    return Object.fromEntries(Object.entries(given).map(([agent, value]) => {
      if (!this.spaces[agent]) throw new MarlvecError("value", `there is no agent "${agent}"; there are ${this.agents}`);
      return [agent, change(this.spaces[agent][side], value)];
    }));
  }

  request(name, fields) {
    if (this.lost) return Promise.reject(this.lost);
    return new Promise((resolve, reject) => {
      this.waiting.push({ name, fields, resolve, reject });
      this.sendOn();
    });
  }

  sendOn() {
    while (this.waiting.length && this.pending.size < this.limits.window) {
      const { name, fields, resolve, reject } = this.waiting.shift();
      const bytes = packMessage(name, fields, this.sent + 1, this.received);
      if (bytes.length > this.limits.max_message) {
        reject(new MarlvecError("limit", `"${name}" has ${bytes.length} bytes, the server takes ${this.limits.max_message}`));
        continue;
      }
      this.pending.set(++this.sent, { bytes, resolve, reject });
      if (this.socket && this.socket.readyState === this.socket.OPEN) this.socket.send(bytes);  // else it goes with the next connection
    }
  }

  welcome({ fields }) {
    const { session, agents, groups, limits } = fields;
    Object.assign(this, { session, limits });
    const spaces = groups.flatMap((group) => group.agents.map((agent) => [agent, group]));
    const found = Object.fromEntries(spaces);
    this.spaces = Object.fromEntries(agents.map((agent) => [agent, found[agent]]));
  }

  listen(socket, early = []) {
    this.socket = socket;
    socket.onmessage = ({ data }) => this.take(data);
    socket.onclose = () => this.reconnect(new MarlvecError("closed", `the connection to ${this.url} broke`));
    for (const data of early) this.take(data);
  }

  take(data) {
    try {
      const { name, number, fields } = unpackMessage(data);
      if (name === "ping") return this.socket.send(packMessage("pong", {}, 0, this.received));
      if (name === "error") return this.fail(new MarlvecError(fields.code, fields.text));
      if (!number || number <= this.received) return;  // a pong, or it came before
      if (number > this.received + 1) throw new MarlvecError("protocol", `message ${number} came after ${this.received}`);
      this.received = number;
      const asked = this.pending.get(fields.re);
      if (!asked) throw new MarlvecError("protocol", `a reply to request ${fields.re}, which waits for none`);
      this.pending.delete(fields.re);
      if (name === "refused") asked.reject(new MarlvecError(fields.code, fields.text));
      else asked.resolve(fields);
      this.sendOn();
    } catch (error) {
      this.fail(error);
    }
  }

  fail(error) {
    if (this.lost) return;
    this.lost = error;
    this.socket.onclose = null;
    this.socket.close();
    for (const { reject } of [...this.pending.values(), ...this.waiting]) reject(error);
    this.pending.clear();
    this.waiting.length = 0;
    this.options.onlost?.(error);
  }

  async reconnect(error) {
    const end = performance.now() + 1000 * this.limits.resume;
    for (let pause = 100; !this.lost && performance.now() < end; pause = Math.min(2 * pause, 10_000)) {
      await new Promise((resolve) => setTimeout(resolve, pause * (0.5 + Math.random() / 2)));
      try {
        const { session, received } = this;
        const { socket, welcome, early } = await shakeHands(this.url, { ...this.options, session, received });
        if (this.lost) return socket.close();
        this.welcome(welcome);
        for (const [number, { bytes }] of this.pending) {
          if (number <= welcome.received) continue;
          putNumber(new DataView(bytes.buffer), 16, this.received);
          socket.send(bytes);
        }
        return this.listen(socket, early);
      } catch (failed) {
        error = failed;
        if (!["closed", "full"].includes(failed.code)) break;
      }
    }
    this.fail(error);
  }
}

/**
 * Connect to a server.
 *
 * @param url e.g. "ws://127.0.0.1:8765/".
 * @param options `token`, if the server has one; `name`, for its log; `onlost`, called with the error when the session
 *     is gone for good; `WebSocket`, the class to use where the browser or Node has none of its own.
 */
export async function connect(url, options = {}) {
  const chosen = { token: "", name: "browser", session: new Uint8Array(), received: 0, ...options };
  return new Client(url, chosen, await shakeHands(url, chosen));
}
