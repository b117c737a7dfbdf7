package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// usual is the Corefile that kubeadm writes.
const usual = `.:53 {
    errors
    health {
       lameduck 5s
    }
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
       pods insecure
       fallthrough in-addr.arpa ip6.arpa
       ttl 30
    }
    prometheus :9153
    forward . /etc/resolv.conf {
       max_concurrent 1000
    }
    cache 30
    loop
    reload
    loadbalance
}
`

// nodeLocalUsual is a part of what NodeLocal DNSCache comes with.
const nodeLocalUsual = `cluster.local:53 {
    errors
    cache {
            success 9984 30
            denial 9984 5
    }
    reload
    loop
    bind 169.254.20.10 10.96.0.10
    forward . __PILLAR__CLUSTER__DNS__ {
            force_tcp
    }
    prometheus :9253
    health 169.254.20.10:8080
    }
.:53 {
    errors
    bind 169.254.20.10 10.96.0.10
    forward . __PILLAR__UPSTREAM__SERVERS__
    }
`

func mustParse(t interface {
	Helper()
	Fatal(...any)
}, text string,
) corefile {
	t.Helper()
	c, err := parseCorefile(text)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestStub(t *testing.T) {
	tests := map[string]struct{ corefile, want string }{
		"CoreDNS": {usual, `clusterset.local:53 {
    errors
    prometheus :9153
    forward . 169.254.20.53 10.96.0.53 {
        policy sequential
    }
}
`},
		"NodeLocal DNSCache": {nodeLocalUsual, `clusterset.local:53 {
    errors
    bind 169.254.20.10 10.96.0.10
    prometheus :9253
    forward . 169.254.20.53 10.96.0.53 {
        policy sequential
    }
}
`},
		"another port": {"# ours\ndns://.:1053, example.org:1053 {\n reload\n}", "clusterset.local:1053 {\n    errors\n    forward . 169.254.20.53 10.96.0.53 {\n        policy sequential\n    }\n}\n"},
		"no port":      {"tls://.:853 {\n}\n(common) {\n errors\n}\nk8s.example.org {\n kubernetes k8s.example.org\n}\n", "clusterset.local {\n    errors\n    forward . 169.254.20.53 10.96.0.53 {\n        policy sequential\n    }\n}\n"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			s, err := mustParse(t, tc.corefile).stub([]string{"169.254.20.53", "10.96.0.53"})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(stubBegin+tc.want+stubEnd, s.String()); diff != "" {
				t.Errorf("stub (-want +have):\n%s", diff)
			}
		})
	}
}

// After an uninstall a Corefile has all other text byte by byte, including text that other writers added meanwhile.
func TestInstallAndUninstallKeepForeignText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		before := rapid.SampledFrom([]string{usual, nodeLocalUsual, strings.TrimSuffix(usual, "\n"), "\n\n" + usual + "\n# end\n\n", strings.ReplaceAll(usual, "\n", "\r\n")}).Draw(t, "before")
		added := rapid.SampledFrom([]string{"", "example.org:53 {\n    whoami\n}\n", "# a note\n"}).Draw(t, "added")
		c := mustParse(t, before)
		first, err := c.stub([]string{"169.254.20.53"})
		if err != nil {
			t.Fatal(err)
		}
		installed := c.with(&first)
		if rapid.Bool().Draw(t, "on top") {
			installed = added + installed
			before = added + before
		} else {
			installed += "\n" + added
			before += "\n" + added
		}
		second := mustParse(t, installed)
		if again := second.with(&first); again != installed {
			t.Fatalf("installing again changed it:\n%s", diff("", installed, again))
		}
		other, err := second.stub([]string{"169.254.20.53", "10.96.0.1"})
		if err != nil {
			t.Fatal(err)
		}
		renewed := mustParse(t, second.with(&other))
		if have := renewed.with(nil); have != before {
			t.Fatalf("left behind:\n%s", diff("", before, have))
		}
		if !strings.Contains(renewed.own, "10.96.0.1") || strings.Count(renewed.before+renewed.own+renewed.after, stubBeginMark) != 1 {
			t.Fatalf("not renewed:\n%s", renewed.own)
		}
	})
}

// A stub that replaces a foreign block stands in its place, also after it is renewed, and gives the place back.
func TestReplacing(t *testing.T) {
	const (
		marked  = "#lighthouse-start AUTO-GENERATED SECTION\n"
		foreign = "clusterset.local:53 {\n    forward . 10.96.7.7 {\n        max_fails 2\n    }\n}\n"
	)
	for name, text := range map[string]string{
		"on top":          foreign + usual,
		"at the end":      usual + marked + foreign + "#lighthouse-end\n",
		"two lines":       usual + "clusterset.local:53\n{\n}\n",
		"without an end":  usual + strings.TrimSuffix(foreign, "\n"),
		"Windows":         strings.ReplaceAll(usual+foreign+usual, "\n", "\r\n"),
		"without another": usual,
	} {
		t.Run(name, func(t *testing.T) {
			c := mustParse(t, text).replacing()
			if err := c.refusal(); err != nil {
				t.Fatal(err)
			}
			s, err := c.stub([]string{"169.254.20.53"})
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains("\n"+c.with(&s), "\n#lighthouse-") {
				t.Errorf("Submariner's operator would remove the stub:\n%s", c.with(&s))
			}
			installed := mustParse(t, c.with(&s)).replacing()
			if len(installed.blocks) != len(c.blocks) || installed.refusal() != nil {
				t.Errorf("the replaced block is still there:\n%s", c.with(&s))
			}
			other, err := installed.stub([]string{"10.96.0.1"})
			if err != nil {
				t.Fatal(err)
			}
			want := strings.TrimSuffix(text, "\n")
			if have := mustParse(t, installed.with(&other)).with(nil); strings.TrimSuffix(have, "\n") != want {
				t.Errorf("put back:\n%s", diff("", text, have))
			}
		})
	}
	for name, text := range map[string]string{
		"other zones":     usual + "clusterset.local:53 example.org:53 {\n}\n",
		"two":             usual + foreign + strings.ReplaceAll(foreign, ":53", ":54"),
		"a line":          strings.Replace(usual, "kubernetes cluster.local", "kubernetes cluster.local clusterset.local", 1),
		"beside the stub": stubBegin + stubEnd + usual + foreign,
	} {
		if err := mustParse(t, text).replacing().refusal(); !errors.Is(err, errForeignZone) {
			t.Errorf("%s: %v, want a refusal", name, err)
		}
	}
}

func TestCorefileRefusal(t *testing.T) {
	tests := map[string]struct {
		corefile string
		says     string // "" is fine
	}{
		"no block has it":        {usual, ""},
		"ours is no hindrance":   {stubBegin + "clusterset.local:53 {\n}\n" + stubEnd + usual, ""},
		"a block":                {usual + "clusterset.local:53 {\n    forward . 10.0.0.1\n}\n", `the server block "clusterset.local:53"`},
		"in capitals, with dot":  {usual + "ClusterSet.Local. {\n}\n", `the server block "ClusterSet.Local."`},
		"CoreDNS's multicluster": {strings.Replace(usual, "kubernetes cluster.local", "kubernetes cluster.local clusterset.local", 1), `the line "kubernetes cluster.local clusterset.local in-addr.arpa ip6.arpa" in block ".:53"`},
		"a name below":           {usual + "# clusterset.local\n", ""},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			err := mustParse(t, tc.corefile).refusal()
			if (err == nil) != (tc.says == "") || err != nil && (!errors.Is(err, errForeignZone) || !strings.Contains(err.Error(), tc.says)) {
				t.Errorf("refused: %v, want %q", err, tc.says)
			}
		})
	}
}

func TestCorefileReloads(t *testing.T) {
	for text, want := range map[string]bool{
		usual: true, nodeLocalUsual: true,
		strings.Replace(usual, "    reload\n", "    # reload\n", 1): false,
		strings.Replace(usual, "    reload\n", "", 1):               false,
		strings.Replace(usual, "reload\n", "reload 2s 1s\n", 1):     true,
	} {
		if have := mustParse(t, text).reloads(); have != want {
			t.Errorf("reloads: %t, want %t:\n%s", have, want, text)
		}
	}
}

func TestCorefileFaults(t *testing.T) {
	for text, says := range map[string]string{
		".:53 {\n errors\n":                     "not all in braces",
		".:53\nerrors\n":                        "not all in braces",
		"}\n":                                   "closing brace without an opening one",
		"{\n}\n":                                "has no zone",
		".:53 {\n rewrite \"a\n}\n":             "quotes",
		stubBegin + usual:                       "has no line",
		stubEnd + usual:                         "in a wrong place",
		stubBegin + stubEnd + stubBegin + usual: "in a wrong place",
	} {
		if _, err := parseCorefile(text); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", text, err, says)
		}
	}
	if _, err := mustParse(t, "example.org {\n}\n").stub(nil); err == nil {
		t.Error("a Corefile of something else was taken")
	}
}

func TestDiff(t *testing.T) {
	have := diff("x", "1\n2\n3\n4\n5\n6\n7\n8\n", "1\n2\n3\n4\nfive\nfive and a half\n6\n7\n8\n")
	want := "--- x\n+++ x\n@@ -2,7 +2,8 @@\n 2\n 3\n 4\n-5\n+five\n+five and a half\n 6\n 7\n 8\n"
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("(-want +have):\n%s", diff)
	}
}
