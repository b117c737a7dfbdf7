package zone

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/dns/internal/mutate"
)

func save(t testing.TB, z *Zone) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := z.Save(&b, 1_700_000_000); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestSavedZoneComesBack(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]Config{"kep": kep, "lighthouse": lighthouse} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			z := build(t, allKinds(), c)
			got, made, err := Load(save(t, z))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(z.String(), got.String()); diff != "" {
				t.Errorf("-saved +loaded:\n%s", diff)
			}
			if got.Len() != z.Len() || got.Names() != z.Names() || got.Serial() != z.Serial() || made != 1_700_000_000 {
				t.Errorf("loaded %d records of %d names, serial %d, made at %d", got.Len(), got.Names(), got.Serial(), made)
			}
			for name, typ := range map[string]Type{"pg.db.svc.clusterset.local.": SRV, "0.0.243.in-addr.arpa.": PTR, "x.clusterset.local.": A} {
				if diff := cmp.Diff(ask(t, z, name, typ, 1, 512), ask(t, got, name, typ, 1, 512)); diff != "" {
					t.Errorf("%s %s (-saved +loaded):\n%s", name, typ, diff)
				}
			}
		})
	}
}

// sealed corrects the checksum, so that Load goes on to check the contents.
func sealed(b []byte) []byte {
	end := len(b) - 4
	return binary.BigEndian.AppendUint32(bytes.Clone(b[:end]), crc32.Checksum(b[:end], crc32.MakeTable(crc32.Castagnoli)))
}

func TestDamagedFiles(t *testing.T) {
	t.Parallel()
	whole := save(t, build(t, allKinds(), kep))
	damaged := map[string][]byte{
		"empty": nil, "another format": []byte("{}"), "magic number only": []byte(fileMagic),
		"one bit":       append(bytes.Clone(whole[:100]), append([]byte{whole[100] ^ 1}, whole[101:]...)...),
		"too much":      sealed(append(bytes.Clone(whole), 0, 0, 0, 0, 0)),
		"other version": append([]byte(fileMagic[:len(fileMagic)-1]+"\x01"), whole[len(fileMagic):]...),
	}
	for n := 0; n < len(whole)-4; n += 7 { // up to the checksum, which sealed corrects
		damaged["cut"] = whole[:n]
		damaged["cut and sealed"] = sealed(append(bytes.Clone(whole[:n]), 0, 0, 0, 0))
		for name, b := range damaged {
			if _, _, err := Load(b); !errors.Is(err, ErrCorrupt) {
				t.Errorf("%s at %d: %v, want %v", name, n, err, ErrCorrupt)
			}
		}
		clear(damaged)
	}
}

// FuzzLoad is TestLoadAnyBytes without a time limit.
func FuzzLoad(f *testing.F) {
	for _, c := range []Config{lighthouse, kep} {
		f.Add(save(f, build(f, allKinds(), c)))
	}
	f.Fuzz(func(_ *testing.T, b []byte) { loadAndAsk(b) })
}

func TestLoadAnyBytes(t *testing.T) {
	t.Parallel()
	corpus := [][]byte{save(t, build(t, allKinds(), lighthouse)), save(t, build(t, allKinds(), kep))}
	mutate.Each(t, mutate.Rounds/20, corpus, loadAndAsk) // each input is a whole zone
}

// loadAndAsk checks that questions to any zone that loads do not panic.
func loadAndAsk(b []byte) {
	if len(b) < 4 {
		return
	}
	z, _, err := Load(sealed(b))
	if err != nil {
		return
	}
	_ = z.String()
	for e := range z.entries() {
		for _, typ := range []Type{A, AAAA, SRV, TXT, ANY, SOA} {
			msg := append(make([]byte, HeaderLen, 2048), e.name()...)
			z.Append(append(msg, 0, byte(typ), 0, 1), Question{[]byte(e.name()), typ}, 3, 1232)
		}
	}
}
