package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
)

// TestInstallDocs verifies that the programs accept the examples of docs/gateway-install.md: the settings in the chart's
// values, which tools/check/tree renders, and the GatewayNode, whose Secret the controller may read.
func TestInstallDocs(t *testing.T) {
	page, err := os.ReadFile("../../docs/gateway-install.md")
	if err != nil {
		t.Fatal(err)
	}
	var values struct {
		GatewayController struct {
			PasswordSecrets []string
			Settings        map[string]any
		}
	}
	var node v1alpha1.GatewayNode
	for _, block := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(page), -1) {
		switch text := block[1]; {
		case strings.HasPrefix(text, "# values.yaml"):
			err = yaml.Unmarshal([]byte(text), &values)
		case strings.Contains(text, "kind: GatewayNode"):
			err = yaml.UnmarshalStrict([]byte(text), &node)
		}
		if err != nil {
			t.Fatalf("%v\n%s", err, block[1])
		}
	}
	settings, err := yaml.Marshal(values.GatewayController.Settings)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, settings, 0o600); err != nil {
		t.Fatal(err)
	}
	if s, err := readSettings(path); err != nil || len(s.Pools) != 2 {
		t.Errorf("%d pools, %v", len(s.Pools), err)
	}
	if node.Spec.BGP == nil || node.Spec.VRRP == nil || len(values.GatewayController.PasswordSecrets) != 1 ||
		node.Spec.BGP.Peers[0].PasswordSecret != values.GatewayController.PasswordSecrets[0] {
		t.Errorf("GatewayNode %+v, and Secrets %v", node.Spec, values.GatewayController.PasswordSecrets)
	}
}
