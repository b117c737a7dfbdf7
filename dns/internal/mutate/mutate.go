// Package mutate derives many random inputs from a few given ones, for tests of properties that hold for any bytes. Unlike
// go test -fuzz it does not measure coverage, and so it is cheap enough to run with all other tests.
package mutate

import (
	"encoding/hex"
	"math/rand/v2"
	"slices"
	"testing"
)

// Rounds is the number of messages that a test tries. One worker of the fuzzer takes about 20 seconds for as many.
const Rounds = 60_000

// maxChanges is the largest number of changes made to an input.
const maxChanges = 6

// Each calls check with n inputs derived from corpus, which must not be empty; they differ from run to run. An input is valid
// until check returns. If the test fails, its log shows the last input.
func Each(tb testing.TB, n int, corpus [][]byte, check func(in []byte)) {
	tb.Helper()
	var in []byte
	passed := false
	defer func() {
		if !passed {
			tb.Logf("the input:\n%s", hex.Dump(in))
		}
	}()
	dice := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	for range n {
		in = append(in[:0], pick(dice, corpus)...)
		for range 1 + dice.IntN(maxChanges) {
			in = change(dice, in, corpus)
		}
		check(in)
		if tb.Failed() {
			return
		}
	}
	passed = true
}

func pick[T any](dice *rand.Rand, from []T) T { return from[dice.IntN(len(from))] }

// special holds bytes with a meaning as length, count, compression pointer or letter.
var special = []byte{0, 1, 2, 0x0c, 0x3f, 0x40, 0x7f, 0x80, 0xc0, 0xff, 'A', 'Z', 'a', 'z', '.', '_'}

// change makes one random change to in.
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
		in[at] = pick(dice, special)
	case 3:
		return in[:at]
	case 4:
		return slices.Delete(in, at, end)
	case 5: // duplicate a range
		return slices.Insert(in, at, slices.Clone(in[at:end])...)
	case 6: // append the end of another input
		other := pick(dice, corpus)
		return append(in[:at], other[dice.IntN(len(other)+1):]...)
	}
	return in
}
