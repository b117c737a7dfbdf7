package bpf_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/isthmus-net/isthmus/bpf"
)

// On each chain of calls, the functions of a program share 512 bytes of stack, and Linux 6.1 rounds what each uses up to 32. Other
// kernels round less.
func TestStack(t *testing.T) {
	const limit = 512
	for name, load := range map[string]func() (*ebpf.CollectionSpec, error){
		"sockets": bpf.LoadSpec, "packets": bpf.LoadPacketSpec, "gateway": bpf.LoadGatewaySpec, "names": bpf.LoadNamesSpec,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			spec, err := load()
			if err != nil {
				t.Fatal(err)
			}
			for program, p := range spec.Programs {
				functions := functionsOf(p.Instructions)
				if depth, chain := deepest(functions, p.Instructions[0].Symbol()); depth == 0 || depth > limit {
					t.Errorf("%s needs %d bytes of stack, of at most %d, by %s", program, depth, limit, strings.Join(chain, " -> "))
				}
			}
		})
	}
}

// function is what one function does with the stack.
type function struct {
	stack int
	calls []string
}

// functionsOf divides the instructions of a program into its functions, by name.
func functionsOf(all asm.Instructions) map[string]*function {
	functions := map[string]*function{}
	var f *function
	for _, in := range all {
		if name := in.Symbol(); name != "" {
			f = &function{}
			functions[name] = f
		}
		switch class := in.OpCode.Class(); {
		case in.IsFunctionCall():
			f.calls = append(f.calls, in.Reference())
		case class.IsLoad() && in.Src == asm.RFP, class.IsStore() && in.Dst == asm.RFP:
			f.stack = max(f.stack, -int(in.Offset))
		}
	}
	return functions
}

// deepest returns the chain of calls from a function that needs most stack, and what it needs.
func deepest(functions map[string]*function, name string) (depth int, chain []string) {
	const rounded = 32
	f := functions[name]
	if f == nil {
		return 0, nil // of the kernel
	}
	for _, called := range f.calls {
		if d, c := deepest(functions, called); d > depth {
			depth, chain = d, c
		}
	}
	return depth + (max(f.stack, 1)+rounded-1)/rounded*rounded, slices.Concat([]string{name}, chain)
}
