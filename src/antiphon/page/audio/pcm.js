// Samples as numbers, as 16-bit integers, and as text for the wire. Shown by tests/page/test_sound.py.

/** Characters of one call of String.fromCharCode. */
const MAX_ARGUMENTS = 8192;

/** @param {Float32Array} samples @returns {Int16Array} */
export function toPcm16(samples) {
  return Int16Array.from(samples, (value) => Math.max(-32768, Math.min(32767, Math.round(32767 * value))));
}

/** @param {Int16Array} pcm @returns {Float32Array} */
export function toFloats(pcm) {
  return Float32Array.from(pcm, (value) => value / 32768);
}

/** @param {Uint8Array} bytes @returns {string} */
export function toBase64(bytes) {
  let text = "";
  for (let start = 0; start < bytes.length; start += MAX_ARGUMENTS) {
    text += String.fromCharCode(...bytes.subarray(start, start + MAX_ARGUMENTS));
  }
  return btoa(text);
}

/** @param {string} text base64 of little-endian PCM16 @returns {Int16Array} */
export function pcm16FromBase64(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Int16Array(bytes.buffer, 0, bytes.length >> 1);
}

/** @param {Int16Array} pcm @returns {string} */
export function pcm16ToBase64(pcm) {
  return toBase64(new Uint8Array(pcm.buffer, pcm.byteOffset, pcm.byteLength));
}

/** @param {Float32Array} samples @returns {number} root mean square */
export function loudness(samples) {
  let sum = 0;
  for (const value of samples) sum += value * value;
  return samples.length === 0 ? 0 : Math.sqrt(sum / samples.length);
}
