// Package mutate makes many inputs of a few, for tests of a law that holds over any bytes. It does not see what its
// inputs reach, as go test -fuzz does, and is so cheap for it that these tests run with all others.
package mutate

import (
	"encoding/hex"
	"math/rand/v2"
	"slices"
	"testing"
)

// Rounds is how many messages a test takes: as many as the fuzzer, with one worker on this project's machine, gets
// through in 20 seconds.
const Rounds = 60_000

// maxChanges is how many changes an input is at most away from what it was made of.
const maxChanges = 6

// Each calls hold with n inputs, other ones in each run, made of those of corpus, of which there must be one. An input
// is hold's until it returns. The one that a test ends with stands in its log.
func Each(tb testing.TB, n int, corpus [][]byte, hold func(in []byte)) {
	tb.Helper()
	var in []byte
	held := false
	defer func() {
		if !held {
			tb.Logf("the input:\n%s", hex.Dump(in))
		}
	}()
	dice := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	for range n {
		in = append(in[:0], pick(dice, corpus)...)
		for range 1 + dice.IntN(maxChanges) {
			in = change(dice, in, corpus)
		}
		hold(in)
		if tb.Failed() {
			return
		}
	}
	held = true
}

func pick[T any](dice *rand.Rand, from []T) T { return from[dice.IntN(len(from))] }

// telling are bytes that mean something where lengths, counts, pointers and letters stand.
var telling = []byte{0, 1, 2, 0x0c, 0x3f, 0x40, 0x7f, 0x80, 0xc0, 0xff, 'A', 'Z', 'a', 'z', '.', '_'}

// change changes one thing of in.
func change(dice *rand.Rand, in []byte, corpus [][]byte) []byte {
	if len(in) == 0 {
		return append(in, pick(dice, corpus)...)
	}
	at := dice.IntN(len(in))
	end := at + 1 + dice.IntN(min(len(in)-at, 16))
	switch dice.IntN(7) {
	case 0:
		in[at] ^= 1 << dice.IntN(8)
	case 1:
		in[at] = byte(dice.Uint32())
	case 2:
		in[at] = pick(dice, telling)
	case 3:
		return in[:at]
	case 4:
		return slices.Delete(in, at, end)
	case 5: // once more
		return slices.Insert(in, at, slices.Clone(in[at:end])...)
	case 6: // the end of another one
		other := pick(dice, corpus)
		return append(in[:at], other[dice.IntN(len(other)+1):]...)
	}
	return in
}
