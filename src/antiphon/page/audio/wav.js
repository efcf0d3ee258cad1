// The header of a WAV file of 16-bit samples. Shown by tests/page/test_saving.py.

export const HEADER_BYTES = 44;

/** @param {number} numBytes of samples @param {number} numChannels @param {number} rateHz @returns {ArrayBuffer} */
export function wavHeader(numBytes, numChannels, rateHz) {
  const header = new DataView(new ArrayBuffer(HEADER_BYTES));
  const text = (place, word) => [...word].forEach((letter, i) => header.setUint8(place + i, letter.charCodeAt(0)));
  const frameBytes = 2 * numChannels;
  text(0, "RIFF");
  header.setUint32(4, HEADER_BYTES - 8 + numBytes, true);
  text(8, "WAVEfmt ");
  header.setUint32(16, 16, true);
  header.setUint16(20, 1, true);
  header.setUint16(22, numChannels, true);
  header.setUint32(24, rateHz, true);
  header.setUint32(28, rateHz * frameBytes, true);
  header.setUint16(32, frameBytes, true);
  header.setUint16(34, 16, true);
  text(36, "data");
  header.setUint32(40, numBytes, true);
  return header.buffer;
}
