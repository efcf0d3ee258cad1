#!/usr/bin/env bash
# Makes the two recordings that ship with the project. Needs espeak-ng and sox; their output is ours to ship.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say() { espeak-ng -v "$1" -s "$2" -p "$3" -w "$work/$4.wav" "$5"; }

# A caller: questions with pauses for the answers, on a line with a little noise.
say en-us+f3 155 52 a "Hello. Are you there? I would like to ask you something."
say en-us+f3 150 52 b "What do you see on the table in front of me?"
say en-us+f3 165 52 c "Wait, one more thing. Could you say that again, a little slower?"
say en-us+f3 155 52 d "Thank you. That was all. Goodbye."
gap() { sox -n -r 22050 -c 1 "$work/gap$1.wav" trim 0 "$1"; }
for seconds in 0.6 2 4 5; do gap "$seconds"; done
cd "$work"
sox gap0.6.wav a.wav gap4.wav b.wav gap5.wav c.wav gap5.wav d.wav gap2.wav speech.wav
sox speech.wav -r 16000 -b 16 quiet.wav gain -n -9
sox -R quiet.wav -p synth pinknoise vol 0.004 | sox -R -m quiet.wav - -b 16 "$OLDPWD/examples/caller.flac"
cd "$OLDPWD"

# The voice that speaks when none is given.
espeak-ng -v en-gb-x-rp+f2 -s 145 -p 45 -w "$work/voice.wav" \
  "As an assistant, I will speak using this voice. It is calm and clear, and it takes its time with every word."
sox "$work/voice.wav" -r 24000 -b 16 src/antiphon/assets/default_voice.flac gain -n -6
soxi examples/caller.flac src/antiphon/assets/default_voice.flac
