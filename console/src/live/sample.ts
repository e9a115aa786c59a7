// One sample of GET /v1/admin/live. null stands for what a runtime does not tell.

export interface Sample {
  version: number;
  time: number;
  interval_s: number;
  elapsed_s: number;
  server: {
    version: string;
    pid: number;
    started_at: number;
    uptime_s: number;
    state: "loading" | "ready" | "unready" | "draining";
    reason: string;
    num_workers: number;
  };
  throughput: {
    prompt_tokens_per_s: number;
    cached_tokens_per_s: number;
    generated_tokens_per_s: number;
    requests_per_s: number;
    errors_per_s: number;
    open_streams: number;
    running: number;
    waiting: number;
  };
  latency: { window_s: number; ttft_ms: Percentiles; itl_ms: Percentiles; queue_ms: Percentiles };
  engines: Engine[];
  sequences: { total: number; items: Sequence[] };
  models: Model[];
  tenants: Tenant[];
  keys: { name: string; quotas: Quota[] }[];
  sessions: Session[];
  replicas: Replica[];
  alerts: Alert[];
  warnings: Warning[];
}

export interface Percentiles {
  p50: number | null;
  p90: number | null;
  p99: number | null;
  count: number;
}

export type EngineState = "serving" | "restarting" | "sleeping" | "silent" | "failed" | "draining" | "loading";

export interface Engine {
  model: string;
  version: string;
  replica: string;
  runtime: string;
  policy: string;
  state: EngineState;
  reason: string;
  pids: number[];
  heartbeat_age_s: number | null;
  num_restarts: number;
  running: number;
  waiting: number;
  max_num_seqs: number | null;
  predicted_wait_s: number | null;
  prompt_tokens_per_s: number;
  cached_tokens_per_s: number;
  generated_tokens_per_s: number;
  steps_per_s: number | null;
  busy: number | null;
  blocks: Blocks | null;
  block_map: BlockMap | null;
  steps: Step[] | null;
  steps_left_out: number;
}

export interface Blocks {
  size: number;
  total: number;
  reserved: number;
  used: number;
  shared: number | null;
  cached: number | null;
  free: number;
}

export interface BlockMap {
  /** Base64 of one byte a cell: 0 free, 1 cached, 2 owned by one sequence, 3 shared by several. */
  cells: string;
  blocks_per_cell: number;
  num_cells: number;
  /** Base64 of one byte a cell: 0 nobody, n the n-th holder, 254 a sequence that is not listed, 255 reserved. */
  owners: string;
  /** The running sequences with the most blocks. */
  holders: Holder[];
}

/** A request's id, its blocks, and the most that it may need. */
export type Holder = [string, number, number];

/** When the step ended, how many milliseconds it took, its prefill tokens, decode tokens and sequences. */
export type Step = [number, number, number, number, number];

export interface Sequence {
  id: string;
  request_id: string;
  model: string;
  version: string;
  adapter: string;
  tenant: string;
  priority: number;
  state: "waiting" | "running";
  age_s: number;
  prompt_tokens: number;
  generated_tokens: number;
  max_tokens: number;
  replica: string;
  worker: number;
}

export type ModelState = "READY" | "LOADING" | "UNLOADING" | "UNAVAILABLE" | "";

export interface Model {
  name: string;
  state: ModelState;
  is_llm: boolean;
  versions: ModelVersion[];
}

export interface ModelVersion {
  version: string;
  state: ModelState;
  reason: string;
  weight: number | null;
  in_flight: number;
}

export interface Quota {
  limit: string;
  used: number;
  most: number;
  ratio: number;
}

export interface Tenant {
  name: string;
  running: number;
  waiting: number;
  prompt_tokens_per_s: number;
  generated_tokens_per_s: number;
  quotas: Quota[];
}

export interface Session {
  name: string;
  parent: string;
  tenant: string;
  model: string;
  num_turns: number;
  prompt_tokens: number;
  cached_tokens: number;
  generated_tokens: number;
  /** Tokens of prompts that were computed again, and why those of the last such request were; "" for none. */
  missed_tokens: number;
  miss: string;
  seen_s: number;
}

export interface Replica {
  model: string;
  name: string;
  state: EngineState;
  is_leaving: boolean;
  version: string;
  weight: number;
  num_routed: number;
  num_adopted: number;
}

export interface Alert {
  level: "fail" | "warn" | "note";
  kind: string;
  subject: string;
  text: string;
  remedy: string;
}

export interface Warning {
  time: number;
  level: string;
  logger: string;
  request_id: string;
  message: string;
  /** How often it was repeated; left out where it was not. */
  repeated?: number;
  process: string;
}
