package initramfs

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A reader of the format reads all entries back, for names and contents of various sizes.
func TestWrite(t *testing.T) {
	t.Parallel()
	var files []File
	want := []string{}
	for i := range 9 {
		source := filepath.Join(t.TempDir(), "f")
		content := bytes.Repeat([]byte{'x'}, i)
		if err := os.WriteFile(source, content, 0o600); err != nil {
			t.Fatal(err)
		}
		name := "a/b/" + string(bytes.Repeat([]byte{'n'}, i+1))
		files = append(files, File{name, source})
		want = append(want, fmt.Sprintf("%o %s %s", regular, name, content))
	}
	want = append([]string{"40755 a ", "40755 a/b "}, want...)
	var out bytes.Buffer
	if err := Write(&out, files); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, read(t, out.Bytes())); diff != "" {
		t.Error(diff)
	}
}

// read returns "mode name content" of each entry.
func read(t *testing.T, archive []byte) []string {
	t.Helper()
	var entries []string
	for pos := 0; ; {
		field := func(i int) int {
			n, err := strconv.ParseInt(string(archive[pos+6+8*i:][:8]), 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			return int(n)
		}
		align := func(n int) int { return (n + 3) / 4 * 4 }
		if magic := string(archive[pos:][:6]); magic != "070701" {
			t.Fatalf("magic %q at %d", magic, pos)
		}
		mode, size, nameSize := field(1), field(6), field(11)
		name := string(archive[pos+110:][:nameSize-1])
		if name == "TRAILER!!!" {
			return entries
		}
		pos = align(pos + 110 + nameSize)
		entries = append(entries, fmt.Sprintf("%o %s %s", mode, name, archive[pos:][:size]))
		pos = align(pos + size)
	}
}

func TestWriteNamesTheFileThatIsMissing(t *testing.T) {
	t.Parallel()
	if err := Write(new(bytes.Buffer), []File{{"init", "nowhere"}}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("have %v, want %v", err, fs.ErrNotExist)
	}
}
