"""Physical constants of a call, in one place. Not the model's dimensions: those come from the checkpoint.

Source: MiniCPM-o 4.5 duplex mode (input 16 kHz, units of one second, speech at 24 kHz).
"""

INPUT_RATE_HZ = 16_000
OUTPUT_RATE_HZ = 24_000

UNIT_S = 1.0
UNIT_SAMPLES = INPUT_RATE_HZ
"""Input samples per unit after the first."""

OUTPUT_SAMPLES_PER_UNIT = OUTPUT_RATE_HZ
"""Output samples that cover one unit of input."""

CODEC_RATE_HZ = 25
MEL_FRAME_RATE_HZ = 50
SAMPLES_PER_MEL_FRAME = OUTPUT_RATE_HZ // MEL_FRAME_RATE_HZ
MEL_FRAMES_PER_CODEC_TOKEN = MEL_FRAME_RATE_HZ // CODEC_RATE_HZ
