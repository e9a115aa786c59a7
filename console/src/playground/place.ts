// Where copied code sends its requests.
import { signal } from "@preact/signals";
import { address, ApiError, fetchJson } from "../api/client";
import { apiKey } from "../api/key";
import type { Place } from "./code";

interface GrpcEndpoint {
  port: number;
  tls: boolean;
}

const grpc = signal<GrpcEndpoint | null>(null);

/** Asks the server where it serves gRPC. Nothing is copied for gRPC where it does not say. */
export async function loadPlace(): Promise<void> {
  try {
    const found = await fetchJson<{ grpc?: GrpcEndpoint }>("/", { headers: { accept: "application/json" } });
    grpc.value = found.grpc ?? null;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
  }
}

/** Returns the place, as the browser reaches it. gRPC has no path, so a proxy's prefix is not in its address. */
export function findPlace(): Place {
  const found = grpc.value;
  return {
    url: address("/").replace(/\/$/, ""),
    grpc: found ? `${location.hostname}:${found.port}` : "",
    isGrpcSecure: found?.tls ?? false,
    hasKey: Boolean(apiKey.value),
  };
}
