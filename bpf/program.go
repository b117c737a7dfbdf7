package bpf

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// ProgramID returns the kernel's number of a program, which links tell it by.
func ProgramID(p *ebpf.Program) (ebpf.ProgramID, error) {
	info, err := p.Info()
	if err != nil {
		return 0, fmt.Errorf("ask for program: %w", err)
	}
	id, _ := info.ID()
	return id, nil
}
