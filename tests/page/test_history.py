"""The time line and what it is drawn from, over hours: bounded, and as quick at the end as at the beginning."""

from __future__ import annotations

from page.tabs import Tab


def test_only_what_touches_a_time_is_found_in_it(modules: Tab) -> None:
    assert modules.run(
        tuple[list[int], list[int], int],
        "call/history.js",
        "History, Lane",
        """
        const lane = new Lane();
        for (let at = 0; at < 100; at += 10) {
            lane.set(true, at);
            lane.set(true, at + 3);
            lane.set(false, at + 5);
        }
        const history = new History();
        for (let at = 0; at < 100; at += 10) history.mark("slide", at);
        const found = (startMs, endMs) => lane.within(startMs, endMs).map((span) => span.startMs);
        return [found(14, 31), found(16, 19), history.marksWithin(20, 40).length];
        """,
    ) == ([10, 20, 30], [], 3)


def test_the_past_is_bounded(modules: Tab) -> None:
    spans, marks, turns = modules.run(
        tuple[int, int, int],
        "call/history.js",
        "History",
        """
        const { Transcript } = await import('/page/call/transcript.js');
        const history = new History();
        const transcript = new Transcript();
        for (let at = 0; at < 100000; at += 1) {
            history.caller.set(at % 2 === 0, at);
            history.mark("slide", at);
            transcript.begin("caller", `${at}`, "word", at);
        }
        return [history.caller.spans.length, history.marks.length, transcript.turns.length];
        """,
    )
    assert spans <= 40_000
    assert marks <= 40_000
    assert turns <= 20_000


def test_the_caller_is_heard_above_the_room_and_not_the_room(modules: Tab) -> None:
    assert modules.run(
        list[bool],
        "call/ear.js",
        "Ear",
        """
        const ear = new Ear();
        const hear = (level, packets) => Array.from({ length: packets }, () => ear.hear(level)).at(-1);
        const talk = (seconds) => Array.from({ length: seconds }, () => hear(0.05, 8) && hear(0.002, 2)).at(-1);
        const short = [hear(0.002, 30), hear(0.05, 5), hear(0.002, 2), hear(0.002, 5)];
        return [...short, talk(300), hear(0.002, 9), hear(0.03, 600)];
        """,
    ) == [False, True, True, False, True, False, False]


SIMULATED = """
    const { Call } = await import('/page/call/call.js');
    const { Captions } = await import('/page/view/captions.js');
    const { Timeline } = await import('/page/view/timeline.js');
    const { showGauge } = await import('/page/view/gauge.js');
    const { showFigures } = await import('/page/view/figures.js');
    const { defaults } = await import('/page/call/settings.js');
    const offer = await (await fetch('/page/offer')).json();
    const call = new Call(offer, defaults(offer), '');
    let nowMs = 0;
    Object.defineProperty(call, 'nowMs', { get: () => nowMs });
    call.connection = { send() {}, close() {} };
    for (const name of ['play', 'endItem', 'cut', 'duck']) call.sound[name] = () => {};
    call.phase = 'listening';
    const captions = new Captions(document.querySelector('#captions'));
    call.addEventListener('turn', (event) => captions.add(event.detail));
    const timeline = new Timeline(document.querySelector('#timeline'), () => {});
    const pcm = new Int16Array(1600);
    const delta = btoa(String.fromCharCode(...new Uint8Array(9600)));
    const report = (item, playedMs, isPlaying, happened = []) => call.follow({
        happened, item, playedMs, isPlaying, bufferedMs: 200, targetMs: 80, numUnderruns: 0, level: 0.1,
    });
    // The caller speaks for seconds, the model answers for seconds, and the window slides.
    const second = (number) => {
        const item = `item_${Math.floor(number / 6)}`;
        const place = number % 6;
        if (place === 2) {
            call.hear({ type: 'response.created', response: { id: `r${item}` } });
            call.hear({ type: 'response.output_item.added', item: { id: item } });
        }
        if (place >= 2) {
            const marks = [{ text_chars: 20 * (place - 1), audio_end_ms: 1000 * (place - 1) }];
            const part = { item_id: item, metadata: { audio_text_marks: marks } };
            call.hear({ ...part, type: 'response.output_audio_transcript.delta', delta: 'twenty characters... ' });
            call.hear({ ...part, type: 'response.output_audio.delta', delta });
        }
        for (let tenth = 0; tenth < 10; tenth += 1) {
            nowMs += 100;
            call.sendPacket({ pcm, level: place < 2 ? 0.05 : 0.001 });
            report(item, 1000 * (place - 2) + 100 * tenth, place >= 2);
            call.recorder.add(new Int16Array(4800));
        }
        if (place === 5) {
            call.hear({ type: 'response.done', response: { status: 'completed', output: [{ id: item }] } });
            report(item, 4000, false, [{ kind: 'ended', item, playedMs: 4000 }]);
        }
        const numbers = { context_tokens: 300, context_blocks: 9, retained_units: 20 };
        call.hear({ type: 'session.unit_decided', unit: number, is_listen: place < 2, ...numbers });
        call.hear({ type: 'session.unit_finished', unit: number, thinker_ms: 40, talker_ms: 20, code2wav_ms: 60 });
        if (number % 20 === 0) call.hear({ type: 'session.window_slid', context_tokens: 200, previous_tokens: 0 });
        captions.update();
        showGauge(call.memory);
        showFigures(call.figures, call.memory.numSlides, 0);
    };
    const minute = (number) => {
        const drawn = [];
        for (let one = 0; one < 60; one += 1) second(60 * number + one);
        for (let frame = 0; frame < 60; frame += 1) {
            const before = performance.now();
            timeline.draw(call.history, nowMs);
            captions.update();
            drawn.push(performance.now() - before);
        }
        return drawn.sort((one, other) => one - other)[30];
    };
"""


def test_after_an_hour_the_page_is_as_quick_and_as_large_as_after_a_minute(modules: Tab) -> None:
    """Sixty simulated minutes: what is drawn, what is in the document, and the memory of both ends are compared."""
    session = modules.page.context.new_cdp_session(modules.page)
    first: list[float] = []
    last: list[float] = []
    heap, elements, visible = [], [], []
    modules.page.evaluate(f"async () => {{ {SIMULATED} window.minute = minute; window.call = call; }}")
    for number in range(60):
        drawn_ms = modules.page.evaluate("(number) => window.minute(number)", number)
        (first if number < 5 else last).append(drawn_ms)
        if number in (4, 59):
            session.send("HeapProfiler.collectGarbage")
            heap.append(session.send("Runtime.getHeapUsage")["usedSize"])
            elements.append(modules.page.evaluate("document.querySelectorAll('*').length"))
            visible.append(
                modules.page.evaluate("window.call.history.model.within(window.call.nowMs - 60000, Infinity).length")
            )
    assert modules.page.evaluate("window.call.nowMs") == 3_600_000
    # Of what was said, a few hundred bytes a turn stay for the captions' file; of sound and events, blobs outside.
    assert heap[1] - heap[0] < 3_000_000, heap
    assert visible[1] == visible[0]
    assert elements[1] - elements[0] < 1000, elements
    # The medians of minutes; a machine that others use is not even.
    assert sorted(last[-5:])[2] < 5 * sorted(first)[2] + 5, (first, last)
