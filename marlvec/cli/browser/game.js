/**
 * The rules of connect four, and the board as PettingZoo's connect_four_v3 shows it to an agent.
 *
 * Fields are numbered row by row from the top left, 0 to 41; players are 0 and 1.
 */

export const ROWS = 6;
export const COLUMNS = 7;

const EMPTY = -1;
const DIRECTIONS = [[0, 1], [1, 0], [1, 1], [1, -1]];

/** One game; `play` changes it. */
export class ConnectFour {
  constructor(first = 0) {
    this.fields = new Array(ROWS * COLUMNS).fill(EMPTY);
    this.turn = first;
    this.winner = null;  // 0 or 1
    this.line = [];  // the fields that won
  }

  get isOver() {
    return this.winner !== null || !this.legal().includes(true);
  }

  /** Which columns have room: 7 bools. */
  legal() {
    return Array.from({ length: COLUMNS }, (_, column) => this.fields[column] === EMPTY);
  }

  /** The field where a disc would come to lie in this column. */
  landing(column) {
    for (let row = ROWS - 1; row >= 0; row--) {
      if (this.fields[row * COLUMNS + column] === EMPTY) return row * COLUMNS + column;
    }
    throw new RangeError(`column ${column} is full`);
  }

  /** Whose turn it is drops a disc. Returns the field where it lies. */
  play(column) {
    if (this.isOver) throw new RangeError("the game is over");
    const field = this.landing(column);
    this.fields[field] = this.turn;
    this.line = this.fourThrough(field);
    if (this.line.length) this.winner = this.turn;
    this.turn = 1 - this.turn;
    return field;
  }

  fourThrough(field) {
    const row = Math.floor(field / COLUMNS);
    const column = field % COLUMNS;
    for (const [down, right] of DIRECTIONS) {
      const found = [field];
      for (const way of [1, -1]) {
        for (let k = 1; ; k++) {
          const [r, c] = [row + way * k * down, column + way * k * right];
          const isOn = r >= 0 && r < ROWS && c >= 0 && c < COLUMNS;
          if (!isOn || this.fields[r * COLUMNS + c] !== this.fields[field]) break;
          found.push(r * COLUMNS + c);
        }
      }
      if (found.length >= 4) return found;
    }
    return [];
  }

  /** (6, 7, 2) int8, flat: what is this player's, and what is the other's. */
  observe(player) {
    const planes = new Int8Array(ROWS * COLUMNS * 2);
    this.fields.forEach((owner, field) => {
      if (owner !== EMPTY) planes[2 * field + (owner === player ? 0 : 1)] = 1;
    });
    return planes;
  }
}
