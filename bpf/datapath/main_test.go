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
	if os.Getenv(envClient) != "" {
		clientMain()
		return
	}
	os.Exit(netlab.Main(m))
}
