package membership

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

func TestBrokerInfoFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "info.yaml")
	want := BrokerInfo{
		Kind: brokerInfoKind, ClusterSetID: "prod", Server: "https://192.0.2.1:6443", CA: []byte("pem"),
		Namespace: "isthmus-broker", Token: "secret", Expires: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		ClusterSetIPEnabled: new(false), ClusterSetIPCIDRRange: []string{"242.0.0.0/8"}, ClusterSetIPClusterSize: 8192,
		Settings: v1alpha1.Settings{PortMerge: v1alpha1.PortMergeIntersection},
	}
	for range 2 { // the second time over the first
		if err := want.Write(path); err != nil {
			t.Fatal(err)
		}
	}
	got, err := ReadBrokerInfo(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("read back (-want +got):\n%s", diff)
	}
	conformance.Holds(t, "V37")
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	if err := want.Check(want.Expires); err != nil {
		t.Errorf("at its last moment: %v", err)
	}
	if err := want.Check(want.Expires.Add(1)); !errors.Is(err, ErrExpired) {
		t.Errorf("after its last moment: %v", err)
	}
}
