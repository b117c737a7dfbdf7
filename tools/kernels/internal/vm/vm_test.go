package vm

import "testing"

func TestUnknownArchitecture(t *testing.T) {
	t.Parallel()
	if err := Ensure(t.Context(), "z80", t.Output()); err == nil {
		t.Error("an emulator of the Z80 was found")
	}
}
