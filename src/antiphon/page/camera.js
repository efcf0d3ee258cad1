// A camera or a screen, as one picture a second. Shown by tests/page/test_pictures.py.

import { toBase64 } from "./audio/pcm.js";

const PERIOD_MS = 1000;
/** The model looks at squares of about this size; more only costs. */
const MAX_SIDE_PIXELS = 640;
const QUALITY = 0.8;

/** Owns the stream, and the preview that shows it. */
export class Camera {
  /**
   * Raises a DOMException if there is none, or it may not be used.
   * @param {"camera" | "screen"} kind @param {HTMLVideoElement} preview @param {(picture: string) => void} onPicture
   * base64 of a JPEG @param {() => void} onEnd it was stopped from outside
   */
  static async start(kind, preview, onPicture, onEnd) {
    const stream =
      kind === "camera"
        ? await navigator.mediaDevices.getUserMedia({ video: { width: { ideal: 640 }, facingMode: "user" } })
        : await navigator.mediaDevices.getDisplayMedia({ video: { frameRate: { ideal: 5 } } });
    preview.srcObject = stream;
    await preview.play();
    return new Camera(kind, stream, preview, onPicture, onEnd);
  }

  /** @param {"camera" | "screen"} kind @param {MediaStream} stream @param {HTMLVideoElement} preview
   *  @param {(picture: string) => void} onPicture @param {() => void} onEnd */
  constructor(kind, stream, preview, onPicture, onEnd) {
    this.kind = kind;
    this.stream = stream;
    this.preview = preview;
    this.onPicture = onPicture;
    this.canvas = document.createElement("canvas");
    for (const track of stream.getTracks()) track.onended = onEnd;
    this.timer = setInterval(() => void this.take(), PERIOD_MS);
  }

  async take() {
    const { videoWidth: width, videoHeight: height } = this.preview;
    if (width === 0 || height === 0) return;
    const scale = Math.min(1, MAX_SIDE_PIXELS / Math.max(width, height));
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.getContext("2d").drawImage(this.preview, 0, 0, this.canvas.width, this.canvas.height);
    const blob = await new Promise((resolve) => this.canvas.toBlob(resolve, "image/jpeg", QUALITY));
    if (blob !== null) this.onPicture(toBase64(new Uint8Array(await blob.arrayBuffer())));
  }

  stop() {
    clearInterval(this.timer);
    for (const track of this.stream.getTracks()) track.stop();
    this.preview.srcObject = null;
  }
}
