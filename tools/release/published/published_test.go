package published

import (
	"crypto/x509"
	"encoding/pem"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/version"
)

// The list is in order, and a version that is in it cannot be built of another commit.
func TestReleases(t *testing.T) {
	t.Parallel()
	all, err := Releases()
	if err != nil || len(all) == 0 {
		t.Fatal(all, err)
	}
	if !slices.IsSortedFunc(all, func(a, b Release) int {
		return -compare(t, a.Version, b.Version)
	}) {
		t.Errorf("not the newest first: %v", all)
	}
	if err := Check(all[0].Version, all[0].Commit); err != nil {
		t.Error(err)
	}
	if err := Check("v99.0.0", all[0].Commit); err != nil {
		t.Error(err)
	}
	if err := Check(all[0].Version, strings.Repeat("0", 40)); err == nil || !strings.Contains(err.Error(), all[0].Commit) {
		t.Errorf("another commit: %v", err)
	}
}

// Only the newest of the published keys signs a release. Text between keys does not count.
func TestCheckKey(t *testing.T) {
	t.Parallel()
	block := func(content string) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: []byte(content)})
	}
	all := slices.Concat([]byte("since v0.2.0\n\n"), block("new"), []byte("\nsince v0.1.0\n"), block("old"))
	if err := checkKey(all, block("new")); err != nil {
		t.Error(err)
	}
	for name, tt := range map[string]struct{ keys, public []byte }{
		"a former key": {all, block("old")}, "another key": {all, block("mine")}, "no key is published": {[]byte("none yet\n"), block("new")}, "no key": {all, nil},
	} {
		if err := checkKey(tt.keys, tt.public); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	for rest := keys; ; { // all of KEYS are public keys
		var one *pem.Block
		if one, rest = pem.Decode(rest); one == nil {
			break
		}
		if _, err := x509.ParsePKIXPublicKey(one.Bytes); err != nil || one.Type != "PUBLIC KEY" {
			t.Errorf("KEYS has a %s: %v", one.Type, err)
		}
	}
}

func compare(t *testing.T, a, b string) int {
	t.Helper()
	v, err := version.ParseSemantic(a)
	if err != nil {
		t.Fatal(err)
	}
	c, err := v.Compare(b)
	if err != nil {
		t.Fatal(err)
	}
	return c
}
