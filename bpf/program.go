package bpf

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// ProgramID returns the kernel's id of a program, by which links refer to it.
func ProgramID(p *ebpf.Program) (ebpf.ProgramID, error) {
	info, err := p.Info()
	if err != nil {
		return 0, fmt.Errorf("ask for program: %w", err)
	}
	id, _ := info.ID()
	return id, nil
}
