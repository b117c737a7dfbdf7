// Package vm boots a kernel in an emulated virtual machine. Emulation is several times slower than hardware virtualization, but
// works on any machine.
package vm

import (
	"context"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/tools/deps/debian"
)

// emulator describes how to emulate a machine of one architecture.
type emulator struct {
	pkg     string // Debian's package of the program
	program string
	machine []string // the arguments that select the machine
	console string   // the kernel's name of the serial line
}

// emulators has an emulator for each architecture, by Go's name.
var emulators = map[string]emulator{
	"amd64": {"qemu-system-x86", "qemu-system-x86_64", []string{"-machine", "q35", "-cpu", "max"}, "ttyS0"},
	// Neoverse N1 is the processor of common cloud machines. "max" takes longer: it signs pointers.
	"arm64": {"qemu-system-arm", "qemu-system-aarch64", []string{"-machine", "virt", "-cpu", "neoverse-n1"}, "ttyAMA0"},
}

// Ensure installs the emulator of an architecture if it is missing.
func Ensure(ctx context.Context, architecture string, progress io.Writer) error {
	e, ok := emulators[architecture]
	if !ok {
		return fmt.Errorf("no emulator of %s is known", architecture)
	}
	return debian.Ensure(ctx, progress, e.pkg)
}

// Machine describes what to boot.
type Machine struct {
	Architecture string // one that Ensure has prepared
	Image        string // the kernel
	Initrd       string // the initramfs; its /init is the first process
}

// Run boots m and returns after it has powered off or panicked. The output of its serial line goes to console. The machine has
// no network, no disk and no other device.
func (m Machine) Run(ctx context.Context, console io.Writer) error {
	var complaints strings.Builder
	e := emulators[m.Architecture]
	cmd := exec.CommandContext(ctx, e.program, slices.Concat(e.machine, []string{
		"-accel", "tcg,thread=multi", "-smp", "2", "-m", "768",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
		"-kernel", m.Image, "-initrd", m.Initrd,
		// panic=-1 with -no-reboot ends the emulator after a panic. mitigations=off saves time.
		"-append", "console=" + e.console + " quiet panic=-1 mitigations=off",
	})...)
	cmd.Stdout, cmd.Stderr = console, &complaints
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("emulate a machine: %w %s", err, complaints.String())
	}
	return nil
}
