package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
)

// withDNS is healthy, with CoreDNS and NodeLocal DNSCache as they usually are, and with agents that answer.
func withDNS() cluster {
	w := healthy()
	config := func(name, corefile string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name}, Data: map[string]string{corefileKey: corefile, "other": "stays"}}
	}
	server := func(name, node, ip, mounts string) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name},
			Spec: corev1.PodSpec{NodeName: node, Volumes: []corev1.Volume{{Name: "config", VolumeSource: corev1.VolumeSource{
				ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: mounts}},
			}}}},
			Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip},
		}
	}
	service := func(namespace, name, ip string) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: corev1.ServiceSpec{ClusterIP: ip, ClusterIPs: []string{ip}}}
	}
	w.objects = append(w.objects,
		config("coredns", usual), config("node-local-dns", nodeLocalUsual),
		server("coredns-1", "n1", "10.1.0.1", "coredns"), server("coredns-2", "n2", "10.1.0.2", "coredns"), server("other", "n2", "10.1.0.3", "other"),
		server("nodelocal-1", "n1", "192.0.2.1", "node-local-dns"), // none on n2
		service("kube-system", "kube-dns", "10.96.0.10"), service(ns, dnsService, "10.96.0.53"),
	)
	change(&w, func(p *corev1.Pod) {
		if p.Namespace == ns {
			p.Status.HostIPs = []corev1.HostIP{{IP: "192.0.2." + strings.TrimPrefix(p.Spec.NodeName, "n")}}
		}
	})
	for pod, own := range map[string]string{"a-1:9470": "192.0.2.1:53", "a-2:19470": "192.0.2.2:5353"} {
		is := w.answers[pod].(status.Agent)
		is.DNS.Listening = []string{"169.254.20.53:53", "[fd47:2d53:7698::53]:53", own}
		w.answers[pod] = is
	}
	w.answers["a-1:9470/ask"] = []status.ClusterDNS{{Answers: true}, {Answers: true}, {Answers: true}, {Answers: true}}
	w.answers["a-2:19470/ask"] = []status.ClusterDNS{{Answers: true}}
	return w
}

func TestUpstreams(t *testing.T) {
	tests := map[string]struct {
		change func(*cluster)
		named  []string
		want   string // or a part of the error
	}{
		"all there is": {want: "169.254.20.53 10.96.0.53 192.0.2.1 192.0.2.2:5353"},
		"no Service": {change: func(w *cluster) {
			change(w, func(s *corev1.Service) {
				if s.Name == dnsService {
					s.Name = "another"
				}
			})
		}, want: "169.254.20.53 192.0.2.1 192.0.2.2:5353"},
		"IPv6 first": {change: func(w *cluster) {
			change(w, func(s *corev1.Service) {
				s.Spec.ClusterIP = "fd00::a"
				s.Spec.ClusterIPs = []string{"fd00::a", "10.96.0.53"}
			})
		}, want: "fd47:2d53:7698::53 fd00::a"},
		"one agent is not ready": {change: func(w *cluster) {
			is := w.answers["a-1:9470"].(status.Agent)
			is.Ready = false
			w.answers["a-1:9470"] = is
		}, want: "169.254.20.53 10.96.0.53 192.0.2.2:5353"},
		"one agent is silent": {change: func(w *cluster) { delete(w.answers, "a-1:9470") }, want: "169.254.20.53 10.96.0.53 192.0.2.2:5353"},
		"no agent answers":    {change: func(w *cluster) { clear(w.answers) }, want: "no agent serves DNS"},
		"nothing in common": {change: func(w *cluster) {
			is := w.answers["a-1:9470"].(status.Agent)
			is.DNS.Listening = []string{"192.0.2.1:53"}
			w.answers["a-1:9470"] = is
		}, want: "no common IPv4 address"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := withDNS()
			if tc.change != nil {
				tc.change(&w)
			}
			found, err := w.collector(t).upstreams(t.Context(), tc.named)
			have := strings.Join(found, " ")
			if err != nil {
				have = err.Error()
			}
			if have != tc.want && (err == nil || !strings.Contains(have, tc.want)) {
				t.Errorf("have %s, want %s", have, tc.want)
			}
		})
	}
}

// Nodes that a stub already names stay in it.
func TestUpstreamsStay(t *testing.T) {
	w := withDNS()
	for _, n := range []string{"n3", "n4"} {
		p := pod("a-"+n[1:], n, "a", corev1.PodRunning, 9470)
		p.Status.HostIPs = []corev1.HostIP{{IP: "192.0.2." + n[1:]}}
		w.objects = append(w.objects, p)
		w.answers[p.Name+":9470"] = status.Agent{Ready: true, DNS: status.DNS{Listening: []string{"169.254.20.53:53", "192.0.2." + n[1:] + ":53"}}}
	}
	have, err := w.collector(t).upstreams(t.Context(), strings.Fields("forward . 169.254.20.53 10.96.0.53 192.0.2.4 192.0.2.9"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"169.254.20.53", "10.96.0.53", "192.0.2.1", "192.0.2.4"}, have); diff != "" {
		t.Errorf("(-want +have):\n%s", diff)
	}
}

// dnsTestbed is a fake cluster with its DNS configs.
type dnsTestbed struct {
	*collector
	sites []*loadedConfig
	out   bytes.Buffer
}

func newDNSTestbed(t *testing.T, w cluster) *dnsTestbed {
	t.Helper()
	d := &dnsTestbed{collector: w.collector(t)}
	d.read(t)
	return d
}

func (d *dnsTestbed) read(t *testing.T) {
	t.Helper()
	sites, err := configNames{usualCoreDNS, usualNodeLocal}.configs()
	if err != nil {
		t.Fatal(err)
	}
	if d.sites, err = readConfigs(t.Context(), d.client, sites); err != nil {
		t.Fatal(err)
	}
}

// change makes an edit as a command would, with what a person types.
func (d *dnsTestbed) change(t *testing.T, f changeFlags, typed string, e edit) (bool, error) {
	t.Helper()
	cmd := &cobra.Command{}
	cmd.SetContext(t.Context())
	cmd.SetIn(strings.NewReader(typed))
	cmd.SetOut(&d.out)
	cmd.SetErr(&d.out)
	changed, err := f.change(cmd, d.collector, d.sites, e)
	d.read(t)
	return changed, err
}

func TestDNSInstallAndUninstall(t *testing.T) {
	d := newDNSTestbed(t, withDNS())
	install := installing([]string{"169.254.20.53", "10.96.0.53"}, false)
	for _, step := range []struct {
		name    string
		flags   changeFlags
		typed   string
		edit    edit
		changed bool
		fails   string
		own     int // Corefiles with our block, afterwards
	}{
		{"dry run", changeFlags{dryRun: true}, "", install, true, "", 0},
		{"a person says no", changeFlags{}, "n\n", install, true, "nothing was written", 0},
		{"nobody exists", changeFlags{}, "", install, true, "--yes", 0},
		{"a person says yes", changeFlags{}, "y\n", install, true, "", 2},
		{"again", changeFlags{}, "", install, false, "", 2},
		{"renewed", changeFlags{yes: true}, "", installing([]string{"169.254.20.53"}, false), true, "", 2},
		{"uninstalled", changeFlags{yes: true}, "", uninstalling, true, "", 0},
		{"again nothing", changeFlags{}, "", uninstalling, false, "", 0},
	} {
		d.out.Reset()
		changed, err := d.change(t, step.flags, step.typed, step.edit)
		if changed != step.changed || (err == nil) != (step.fails == "") || err != nil && !strings.Contains(err.Error(), step.fails) {
			t.Errorf("%s: changed %t, %v", step.name, changed, err)
		}
		if shown := strings.Contains(d.out.String(), "kube-system/coredns"); shown != step.changed {
			t.Errorf("%s: the difference is shown: %t\n%s", step.name, shown, &d.out)
		}
		own := 0
		for _, s := range d.sites {
			if s.parts.own != "" {
				own++
			}
			if s.config.Data["other"] != "stays" {
				t.Errorf("%s: another key has gone", step.name)
			}
		}
		if own != step.own {
			t.Errorf("%s: in %d Corefiles, want %d", step.name, own, step.own)
		}
	}
	if diff := cmp.Diff([]string{usual, nodeLocalUsual}, []string{d.sites[0].text, d.sites[1].text}); diff != "" {
		t.Errorf("after uninstall (-want +have):\n%s", diff)
	}
}

// The command keeps concurrent changes of another writer, and respects a foreign block.
func TestDNSInstallKeepsForeignEdits(t *testing.T) {
	for name, tc := range map[string]struct{ theirs, fails string }{
		"another zone": {"example.org:53 {\n    whoami\n}\n", ""},
		"our zone":     {"clusterset.local:53 {\n    whoami\n}\n", "foreign configuration"},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDNSTestbed(t, withDNS())
			install := installing([]string{"169.254.20.53"}, false)
			calls := 0
			_, err := d.change(t, changeFlags{yes: true}, "", func(is *loadedConfig) (string, error) {
				want, err := install(is)
				if calls++; calls == 3 { // both were shown, the first is about to be written
					config := &corev1.ConfigMap{}
					if err := d.client.Get(t.Context(), is.key, config); err != nil {
						t.Fatal(err)
					}
					config.Data[corefileKey] += tc.theirs
					if err := d.client.Update(t.Context(), config); err != nil {
						t.Fatal(err)
					}
				}
				return want, err
			})
			if (err == nil) != (tc.fails == "") || err != nil && !strings.Contains(err.Error(), tc.fails) {
				t.Fatalf("error %v, want %q", err, tc.fails)
			}
			if core := d.sites[0]; core.parts.before+core.parts.after != usual+tc.theirs || (core.parts.own == "") != (tc.fails != "") {
				t.Errorf("CoreDNS has\n%s", core.text)
			}
		})
	}
}

func TestDNSInstallRefuses(t *testing.T) {
	for name, tc := range map[string]struct{ node, says string }{
		"no reload": {strings.ReplaceAll(nodeLocalUsual, "    reload\n", ""), "kubectl rollout restart"},
		"theirs":    {nodeLocalUsual + "clusterset.local {\n}\n", "foreign configuration"},
	} {
		t.Run(name, func(t *testing.T) {
			w := withDNS()
			change(&w, func(c *corev1.ConfigMap) {
				if c.Name == "node-local-dns" {
					c.Data[corefileKey] = tc.node
				}
			})
			d := newDNSTestbed(t, w)
			if _, err := d.change(t, changeFlags{yes: true}, "", installing([]string{"169.254.20.53"}, false)); err == nil || !strings.Contains(err.Error(), tc.says) || !strings.Contains(err.Error(), "node-local-dns") {
				t.Errorf("error %v, want %q", err, tc.says)
			}
			if d.sites[0].text != usual {
				t.Errorf("the other Corefile was written all the same:\n%s", d.sites[0].text)
			}
		})
	}
}

func TestDNSConfigs(t *testing.T) {
	w := withDNS()
	remove[*corev1.ConfigMap](&w)
	c := w.collector(t)
	for name, tc := range map[string]struct {
		names configNames
		says  string
	}{
		"none there":   {configNames{usualCoreDNS, usualNodeLocal}, "neither ConfigMap kube-system/coredns nor kube-system/node-local-dns exists"},
		"not the name": {configNames{"kube-system/mine", usualNodeLocal}, "ConfigMap kube-system/mine does not exist"},
		"no name":      {configNames{"coredns", "x/"}, "--node-local-dns=x/ is not NAMESPACE/NAME"},
	} {
		sites, err := tc.names.configs()
		if err == nil {
			_, err = readConfigs(t.Context(), c.client, sites)
		}
		if err == nil || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v, want %q", name, err, tc.says)
		}
	}
}

func TestDNSReport(t *testing.T) {
	tests := map[string]struct {
		change  func(*cluster)
		install bool
		want    string
	}{
		"not installed": {change: func(w *cluster) {
			w.answers["a-2:19470/ask"] = []status.ClusterDNS{{Reason: "it has no zone clusterset.local"}}
		}, want: `
SERVER              CONFIGMAP                   STATE          RELOADS
CoreDNS             kube-system/coredns         not installed  yes
NodeLocal DNSCache  kube-system/node-local-dns  not installed  yes

NODE  SERVER            ANSWERS
n1    10.1.0.1:53       yes
n1    10.1.0.2:53       yes
n1    10.96.0.10:53     yes
n1    169.254.20.10:53  yes
n2    10.96.0.10:53     no: it has no zone clusterset.local

upstreams, in this order: 169.254.20.53 10.96.0.53 192.0.2.1 192.0.2.2:5353

problem: CoreDNS (ConfigMap kube-system/coredns) does not forward to the agents: run isthmusctl dns install

problem: NodeLocal DNSCache (ConfigMap kube-system/node-local-dns) does not forward to the agents: run isthmusctl dns install

problem: no answer for clusterset.local from 10.96.0.10:53 on n2: it has no zone clusterset.local
`},
		"installed": {install: true, want: `
SERVER              CONFIGMAP                   STATE      RELOADS
CoreDNS             kube-system/coredns         installed  yes
NodeLocal DNSCache  kube-system/node-local-dns  installed  yes

NODE  SERVER            ANSWERS
n1    10.1.0.1:53       yes
n1    10.1.0.2:53       yes
n1    10.96.0.10:53     yes
n1    169.254.20.10:53  yes
n2    10.96.0.10:53     yes

upstreams, in this order: 169.254.20.53 10.96.0.53 192.0.2.1 192.0.2.2:5353
`},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := withDNS()
			if tc.change != nil {
				tc.change(&w)
			}
			d := newDNSTestbed(t, w)
			if tc.install {
				upstreams, err := d.upstreams(t.Context(), nil)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := d.change(t, changeFlags{yes: true}, "", installing(upstreams, false)); err != nil {
					t.Fatal(err)
				}
			}
			r, err := d.dnsReport(t.Context(), &dnsFlags{}, d.sites)
			if err != nil {
				t.Fatal(err)
			}
			var out strings.Builder
			if err := r.writeText(&out); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(strings.TrimPrefix(tc.want, "\n"), out.String()); diff != "" {
				t.Errorf("(-want +have):\n%s", diff)
			}
			if (r.err() == nil) != tc.install {
				t.Errorf("error %v", r.err())
			}
		})
	}
}

// The command names the servers that do not answer while it waits, and at the end.
func TestAwaitReload(t *testing.T) {
	w := withDNS()
	d := newDNSTestbed(t, w)
	if err := d.awaitReload(t.Context(), &d.out, d.sites, nil, time.Minute, unanswering); err != nil || d.out.Len() > 0 {
		t.Errorf("all answer: %v\n%s", err, &d.out)
	}
	w.answers["a-2:19470/ask"] = []status.ClusterDNS{{Reason: "it does not answer: i/o timeout"}}
	d = newDNSTestbed(t, w)
	err := d.awaitReload(t.Context(), &d.out, d.sites, nil, 50*time.Millisecond, unanswering)
	const who = "10.96.0.10:53 on n2: it does not answer: i/o timeout"
	if err == nil || !strings.Contains(err.Error(), "not reloaded after 50ms: "+who) || strings.Count(d.out.String(), who) != 1 {
		t.Errorf("one does not answer: %v\n%s", err, &d.out)
	}
	err = d.awaitReload(t.Context(), &d.out, d.sites, nil, 50*time.Millisecond, answering)
	if err == nil || !strings.Contains(err.Error(), "10.96.0.10:53 on n1") || !strings.Contains(err.Error(), "still asks the agents") || strings.Contains(err.Error(), "n2") {
		t.Errorf("after an uninstall, one still answers: %v", err)
	}
	change(&w, func(p *corev1.Pod) { p.Spec.Volumes = nil })
	d = newDNSTestbed(t, w)
	if err := d.awaitReload(t.Context(), &d.out, d.sites, nil, time.Minute, unanswering); err == nil || !strings.Contains(err.Error(), "no running pod mounts it") {
		t.Errorf("no pod mounts it: %v", err)
	}
}
