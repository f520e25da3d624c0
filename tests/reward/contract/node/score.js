// Scores a video over a stream with what the .proto files say and nothing else.
// usage: node score.js HOST:PORT PHOTO FRAMES WIDTH HEIGHT PROTO_DIR...
// PHOTO is an image file; FRAMES holds raw RGB24 frames, one after the other. Prints one JSON object.
"use strict";

const { readFileSync } = require("node:fs");
const { randomUUID } = require("node:crypto");
const { crc32 } = require("node:zlib");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [endpoint, photo, framesFile, width, height, ...includeDirs] = process.argv.slice(2);
const definition = loader.loadSync("likeness/reward/v1/reward_service.proto", {
  includeDirs, longs: Number, enums: String, defaults: true, oneofs: true,
});
const { RewardService } = grpc.loadPackageDefinition(definition).likeness.reward.v1;

const FRAMES_PER_MESSAGE = 3;
const deadline = () => new Date(Date.now() + 30_000);

function call(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, { deadline: deadline() }, (error, response) => (error ? reject(error) : resolve(response)));
  });
}

function framesOf(bytes, size) {
  return Array.from({ length: bytes.length / size }, (_, index) => bytes.subarray(index * size, (index + 1) * size));
}

function scoreOverStream(client, identity, frames) {
  return new Promise((resolve, reject) => {
    const stream = client.StreamVideoScores({ deadline: deadline() });
    const results = [];
    stream.on("data", ({ result }) => result && results.push(result));
    stream.on("error", reject);
    stream.on("end", () => resolve(results));
    stream.write({ config: { requestId: randomUUID(), identity, options: { includeFrames: true } } });
    const spec = { encoding: "FRAME_ENCODING_RGB24", width: Number(width), height: Number(height), frameCount: frames.length };
    stream.write({ videoStart: { videoId: "video", spec } });
    for (let first = 0; first < frames.length; first += FRAMES_PER_MESSAGE) {
      const some = frames.slice(first, first + FRAMES_PER_MESSAGE);
      const sum = crc32 ? { crc32: crc32(Buffer.concat(some)) } : {};
      stream.write({ frames: { videoId: "video", firstFrameIndex: first, frames: some, ...sum } });
    }
    stream.write({ videoEnd: { videoId: "video" } });
    stream.end();
  });
}

async function main() {
  const client = new RewardService(endpoint, grpc.credentials.createInsecure(), {
    "grpc.max_send_message_length": -1,
  });
  const info = await call(client, "GetServerInfo", {});
  const { identity } = await call(client, "EmbedIdentity", { images: [readFileSync(photo)] });
  const frames = framesOf(readFileSync(framesFile), width * height * 3);
  const [{ videoId, reward }] = await scoreOverStream(client, identity, frames);
  const refusal = await call(client, "EmbedIdentity", { images: [Buffer.from("no image")] }).catch((error) => error);
  client.close();
  console.log(JSON.stringify({
    pack: info.packName, videoId, value: reward.value, coverage: reward.coverage,
    components: Object.fromEntries(reward.components.map(({ name, value }) => [name, value])),
    frameCount: reward.frames.length, refusal: { code: grpc.status[refusal.code], details: refusal.details },
  }));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
