"""What a call leaves: sound, captions, events."""

from __future__ import annotations

import json

from page.tabs import Tab

TURNS = """
    const model = {
        id: "a", who: "model", startMs: 61500, endMs: 65500, text: "One two three four.", playedMs: 4000, isCut: false,
        isOver: true, marks: [{ numCharacters: 7, endMs: 2000 }, { numCharacters: 19, endMs: 4000 }],
    };
    const cut = {
        ...model, id: "b", startMs: 70000, endMs: 72000, text: "Heard. Never said <b>.", playedMs: 1000, isCut: true,
        marks: [{ numCharacters: 6, endMs: 1000 }, { numCharacters: 22, endMs: 2000 }],
    };
    const typed = {
        id: "c", who: "caller", startMs: 69000, endMs: 69000, text: "a < b & c", playedMs: 0, isCut: false,
        isOver: true, marks: [],
    };
    const turns = [model, typed, cut];
    const nameOf = (who) => (who === "model" ? "Model" : "You");
"""


def test_captions_as_text_have_what_was_heard(modules: Tab) -> None:
    assert modules.run(str, "call/saving.js", "asText", f"{TURNS} return asText(turns, nameOf);") == (
        "[00:01:01] Model: One two three four.\n[00:01:09] You: a < b & c\n[00:01:10] Model: Heard. —\n"
    )


def test_captions_as_vtt_are_read_by_the_browser_itself(modules: Tab) -> None:
    text = modules.run(str, "call/saving.js", "asVtt", f"{TURNS} return asVtt(turns, nameOf);")
    assert text.startswith("WEBVTT\n\n00:01:01.500 --> 00:01:05.500\n")
    cues = modules.page.evaluate(
        """async (text) => {
            const video = document.createElement('video');
            const track = document.createElement('track');
            track.src = URL.createObjectURL(new Blob([text], { type: 'text/vtt' }));
            video.append(track);
            track.track.mode = 'hidden';
            await new Promise((resolve, reject) => { track.onload = resolve; track.onerror = reject; });
            return [...track.track.cues].map((cue) => [cue.startTime, cue.endTime, cue.getCueAsHTML().textContent]);
        }""",
        text,
    )
    assert cues == [[61.5, 65.5, "One two three four."], [69, 69.5, "a < b & c"], [70, 71, "Heard."]]


def test_a_caption_shows_how_far_the_listener_is(modules: Tab) -> None:
    assert modules.run(
        list[int],
        "call/transcript.js",
        "Transcript, numHeard",
        """
        const transcript = new Transcript();
        const turn = transcript.begin("model", "a", "", 0);
        transcript.say("a", "0123456789");
        const heard = [numHeard(turn)];
        transcript.mark("a", [{ numCharacters: 4, endMs: 1000 }, { numCharacters: 10, endMs: 2000 }]);
        for (const playedMs of [500, 1000, 1500]) {
            transcript.play("a", playedMs, playedMs);
            heard.push(numHeard(turn));
        }
        transcript.end("a", false);
        return [...heard, numHeard(turn)];
        """,
    ) == [0, 2, 4, 7, 10]


def test_characters_are_counted_as_the_server_counts_them(modules: Tab) -> None:
    assert modules.run(
        list[str],
        "call/transcript.js",
        "Transcript, numHeard, piece",
        """
        const turn = new Transcript().begin("model", "a", "😀 你好", 0);
        turn.marks.push({ numCharacters: 2, endMs: 1000 }, { numCharacters: 4, endMs: 2000 });
        turn.playedMs = 1500;
        return [piece(turn.text, 0, numHeard(turn)), piece(turn.text, numHeard(turn), Infinity)];
        """,
    ) == ["😀 你", "好"]


def test_a_log_has_no_sound_and_nothing_that_lets_others_into_the_call(modules: Tab) -> None:
    text = modules.run(
        str,
        "call/log.js",
        "EventLog",
        """
        const log = new EventLog();
        for (let number = 0; number < 1200; number += 1) {
            log.add(number, "server", { type: "response.output_audio.delta", delta: "A".repeat(5000) });
        }
        log.add(1, "server", { type: "session.created", resume_token: "secret" });
        log.add(2, "client", { type: "session.update", session: { ref_audio: "B".repeat(5000) } });
        return log.blob().text();
        """,
    )
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 1202
    assert lines[0]["delta"] == "(5000)"
    assert lines[-1]["session"] == {"ref_audio": "(5000)"}
    assert "secret" not in text
