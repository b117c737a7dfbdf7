// Package vm boots a kernel in an emulated virtual machine. Emulation is several times slower than hardware virtualization, but
// works on any machine.
package vm

import (
	"context"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/tools/deps/debian"
)

// Ensure installs the emulator if it is missing.
func Ensure(ctx context.Context, progress io.Writer) error {
	return debian.Ensure(ctx, progress, "qemu-system-x86")
}

// Machine describes what to boot.
type Machine struct {
	Image  string // the kernel
	Initrd string // the initramfs; its /init is the first process
}

// Run boots m and returns after it has powered off or panicked. The output of its serial line goes to console. The machine has
// no network, no disk and no other device.
func (m Machine) Run(ctx context.Context, console io.Writer) error {
	var complaints strings.Builder
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64",
		"-accel", "tcg,thread=multi", "-machine", "q35", "-cpu", "max", "-smp", "2", "-m", "768",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
		"-kernel", m.Image, "-initrd", m.Initrd,
		// panic=-1 with -no-reboot ends the emulator after a panic. mitigations=off saves time.
		"-append", "console=ttyS0 quiet panic=-1 mitigations=off")
	cmd.Stdout, cmd.Stderr = console, &complaints
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("emulate a machine: %w %s", err, complaints.String())
	}
	return nil
}
