package desired

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestParseRoundTrip(t *testing.T) {
	made := NewRequest(7, example())
	r, err := Parse(made.JSON(), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := example()
	if r.Generation != 7 || r.State.Hash() != want.Hash() || !bytes.Equal(r.JSON(), made.JSON()) {
		t.Errorf("have %+v", r)
	}
	plain, err := json.Marshal(Request{Generation: 7, Hash: made.Hash, State: example()})
	if err != nil || !bytes.Equal(plain, made.JSON()) {
		t.Errorf("the JSON is %s, not %s: %v", made.JSON(), plain, err)
	}
}

// The hash covers the received bytes of the state, in any formatting.
func TestParseHashesReceivedBytes(t *testing.T) {
	b := []byte(`{"state": {"balancer": "nftables", "group": "edge", "cluster": "a"} , "hash": "HASH", "generation": 1}`)
	sum := sha256.Sum256([]byte(`{"balancer": "nftables", "group": "edge", "cluster": "a"}`))
	b = bytes.Replace(b, []byte("HASH"), []byte(hex.EncodeToString(sum[:])), 1)
	r, err := Parse(b, nil)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Parse(r.JSON(), nil)
	if err != nil || again.Hash != r.Hash || again.State.Group != "edge" {
		t.Errorf("have %+v, %v", again, err)
	}
}

func TestParseRefuses(t *testing.T) {
	made := NewRequest(1, example())
	good := made.JSON()
	for name, tt := range map[string]struct{ old, by, want string }{
		"a state that differs from the hash": {`"port":443`, `"port":444`, "hash is"},
		"an unknown field":                   {`"generation"`, `"colour":1,"generation"`, "colour"},
		"two requests":                       {"", "{}", "something follows"},
		"a bracket too many":                 {"", "]", "something follows"},
		"half a request":                     {`"hash"`, "", "read the request"},
		"a hash alone":                       {string(good), `{"hash":""}`, "hash is"},
		"no object":                          {string(good), `[]`, "not a JSON object"},
		"two states":                         {`"state"`, `"state":{},"state"`, "twice"},
		"VIPs in two places":                 {`"vrrp"`, `"VIPs":[{}],"vrrp"`, "twice"},
		"nothing":                            {string(good), "", "EOF"},
	} {
		b := []byte(strings.Replace(string(good), tt.old, tt.by, 1))
		if tt.old == "" {
			b = append(slices.Clone(good), tt.by...)
		}
		if _, err := Parse(b, nil); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error %v, want one with %q", name, err, tt.want)
		}
	}
}

// Unchanged VIPs are reused, and changed ones are decoded.
func TestParseReusesVIPs(t *testing.T) {
	s := example()
	odd := s.VIPs[0]
	odd.Addr = netip.MustParseAddr("198.51.100.8")
	odd.Frontends = slices.Clone(odd.Frontends)
	odd.Frontends[0].Service = `shop/]}"vips":[{\\`
	s.VIPs = append(s.VIPs, odd)
	made := NewRequest(1, s)
	first, err := Parse(made.JSON(), nil)
	if err != nil {
		t.Fatal(err)
	}
	s.VIPs = slices.Clone(s.VIPs)
	s.VIPs[0].Return = Masquerade
	made = NewRequest(2, s)
	second, err := Parse(made.JSON(), &first)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(second.State, s) {
		t.Errorf("have %+v, want %+v", second.State, s)
	}
	if &second.State.VIPs[1].Frontends[0] != &first.State.VIPs[1].Frontends[0] {
		t.Error("a VIP was read again")
	}
}

// FuzzParse compares Parse with encoding/json.
func FuzzParse(f *testing.F) {
	made := NewRequest(1, example())
	f.Add(made.JSON())
	f.Add([]byte(`{}]0"vips":[{}]`))
	f.Add([]byte(`{"state":{"vips":[{},{"addr":"}\\"]"}]},"hash":"vips\\":[{}]"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var have, want Request
		if have.decode(b, new(Request)) != nil {
			return
		}
		d := json.NewDecoder(bytes.NewReader(b))
		d.DisallowUnknownFields()
		if err := d.Decode(&want); err != nil {
			t.Fatalf("what is no request is read: %v", err)
		}
		if have.Hash != want.Hash || have.Generation != want.Generation || have.State.Hash() != want.State.Hash() {
			t.Errorf("have %+v, want %+v", have, want)
		}
	})
}
