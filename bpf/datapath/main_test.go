package datapath

import (
	"os"
	"testing"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestMain(m *testing.M) {
	if os.Getenv(envUpgrade) != "" {
		upgradeAndWait()
		return
	}
	os.Exit(netlab.Main(m))
}
