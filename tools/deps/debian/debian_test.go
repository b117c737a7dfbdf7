package debian

import (
	"os/exec"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestMissing(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("dpkg-query"); err != nil {
		netlab.Skip(t, "not a Debian machine")
	}
	have, err := Missing(t.Context(), "no-such-package-b", "dpkg", "no-such-package-a", "no-such-package-a")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"no-such-package-a", "no-such-package-b"}, have); diff != "" {
		t.Errorf("missing (-want +have):\n%s", diff)
	}
}
