/** The page: a person against a policy. This page is the simulator; see marlvec.js for who answers. */

import { COLUMNS, ConnectFour, ROWS } from "./game.js";
import { connect } from "./marlvec.js";

const AGENTS = ["player_0", "player_1"];
const at = (id) => document.getElementById(id);

const score = { you: 0, policy: 0, draws: 0 };
let client = null;
let episode = null;
let game = null;
let you = 1;  // which player; the first game makes it 0
let isBusy = true;  // the policy thinks, or there is no policy to play against

// --- what is seen ----------------------------------------------------------------------------------------------------

const columns = Array.from({ length: COLUMNS }, (_, column) => {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "column";
  button.dataset.column = column;
  for (let row = 0; row < ROWS; row++) {
    const hole = document.createElement("span");
    hole.className = "hole";
    hole.style.setProperty("--fall", row + 1);
    button.append(hole);
  }
  button.addEventListener("click", () => move(column));
  at("board").append(button);
  return button;
});

const holeAt = (field) => columns[field % COLUMNS].children[Math.floor(field / COLUMNS)];

function say(text) {
  at("status").textContent = text;
}

function draw(fresh = null) {
  const legal = game.legal();
  const isYours = !isBusy && !game.isOver;
  game.fields.forEach((owner, field) => {
    const classes = owner < 0 ? "" : owner === you ? "mine" : "theirs";
    holeAt(field).className = ["hole", classes, field === fresh && "fresh", game.line.includes(field) && "won"]
      .filter(Boolean).join(" ");
  });
  columns.forEach((button, column) => {
    button.disabled = !isYours || !legal[column];
    button.ariaLabel = `Column ${column + 1}${legal[column] ? "" : ", full"}`;
    if (!button.disabled) holeAt(game.landing(column)).classList.add("next");
  });
  at("board").classList.toggle("is-over", game.winner !== null);
  document.querySelector(".player.you").classList.toggle("moves", isYours);
  document.querySelector(".player.policy").classList.toggle("moves", isBusy && !game.isOver && client !== null);
  at("wins-you").value = score.you;
  at("wins-policy").value = score.policy;
  at("draws").value = score.draws;
  at("again").disabled = client === null || (isBusy && !game.isOver);
}

function lose(error) {
  client = episode = null;
  isBusy = true;
  at("dot").classList.remove("on");
  at("where").textContent = "not connected";
  document.querySelector("details").open = true;
  say(error.code === "closed" ? "No server answers. Is marlvec still running?" : error.message);
  draw();
}

// --- the game, as the policy sees it ---------------------------------------------------------------------------

async function begin() {
  if (episode && !game.isOver) await episode.abandon("a new game was begun");
  you = 1 - you;
  game = new ConnectFour(0);
  isBusy = true;
  draw();
  episode = await client.begin();
  await next();
}

/** The player to move is asked: the policy over the wire, you by a look at the board. */
async function next() {
  if (game.isOver) return finish();
  isBusy = game.turn !== you;
  say(isBusy ? "The policy thinks …" : "Your turn");
  draw();
  if (!isBusy) return;
  const agent = AGENTS[game.turn];
  const actions = await episode.step({ [agent]: game.observe(game.turn) }, { masks: { [agent]: game.legal() } });
  draw(game.play(Number(actions[agent])));
  await next();
}

/** Your move: the policy is not asked about it, but it is sent. */
async function move(column) {
  if (isBusy || game.isOver || !game.legal()[column]) return;
  isBusy = true;
  const agent = AGENTS[you];
  const [obs, legal] = [game.observe(you), game.legal()];
  draw(game.play(column));
  say("The policy thinks …");
  await guarded(async () => {
    await episode.log({ [agent]: obs }, { [agent]: column }, { masks: { [agent]: legal } });
    await next();
  });
}

async function finish() {
  const { winner } = game;
  const rewards = Object.fromEntries(AGENTS.map((agent, player) => [agent, winner === null ? 0 : winner === player ? 1 : -1]));
  const obs = Object.fromEntries(AGENTS.map((agent, player) => [agent, game.observe(player)]));
  if (winner === null) score.draws++;
  else score[winner === you ? "you" : "policy"]++;
  isBusy = false;
  say(winner === null ? "A draw" : winner === you ? "You win!" : "The policy wins");
  draw();
  const over = episode;
  await over.end(obs, { rewards });
}

async function guarded(work) {
  try {
    await work();
  } catch (error) {
    lose(error);
  }
}

async function join() {
  say("Connecting …");
  const address = at("url").value;
  await guarded(async () => {
    await client?.close();
    client = await connect(address, { token: at("token").value, name: "connect four in a page", onlost: lose });
    if (client.agents.join() !== AGENTS.join())
      throw new Error(`This server plays something else: its agents are ${client.agents.join(", ")}`);
    at("dot").classList.add("on");
    at("where").textContent = `connected to ${address}`;
    document.querySelector("details").open = false;
    episode = null;
    await begin();
  });
}

at("url").value = new URLSearchParams(location.search).get("url") ?? document.body.dataset.url;
at("again").addEventListener("click", () => guarded(begin));
at("settings").addEventListener("submit", (event) => (event.preventDefault(), join()));
document.addEventListener("keydown", ({ key, target }) => {
  if (!(target instanceof HTMLInputElement) && key >= "1" && key <= String(COLUMNS)) move(Number(key) - 1);
});

game = new ConnectFour(0);
draw();
join();
