// Package initramfs writes an initramfs, the archive that a kernel unpacks as its first root filesystem.
package initramfs

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
)

// File is an executable file of the archive.
type File struct {
	Path   string // in the archive, without a leading slash
	Source string // the file to copy
}

// The modes (stat(2)) that the archive uses.
const (
	directory = 0o040755
	regular   = 0o100755
)

// Write writes an archive of files and their folders, in cpio's "newc" format. The kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst describes it.
func Write(w io.Writer, files []File) error {
	a := archive{w: w, folders: map[string]bool{".": true}}
	for _, f := range files {
		if err := a.add(f); err != nil {
			return fmt.Errorf("write %s to the initramfs: %w", f.Path, err)
		}
	}
	return a.entry("TRAILER!!!", 0, 0, nil)
}

type archive struct {
	w       io.Writer
	folders map[string]bool // the written ones
	inode   int
}

func (a *archive) add(f File) (err error) {
	if err := a.addFolder(path.Dir(f.Path)); err != nil {
		return err
	}
	in, err := os.Open(f.Source)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.Close()) }()
	st, err := in.Stat()
	if err != nil {
		return err
	}
	return a.entry(f.Path, regular, st.Size(), in)
}

func (a *archive) addFolder(name string) error {
	if a.folders[name] {
		return nil
	}
	a.folders[name] = true
	if err := a.addFolder(path.Dir(name)); err != nil {
		return err
	}
	return a.entry(name, directory, 0, nil)
}

// entry writes a header of 110 bytes, the name with a terminating zero, and size bytes of content. Header with name, and
// content, are each padded to a multiple of four.
func (a *archive) entry(name string, mode uint32, size int64, content io.Reader) error {
	a.inode++
	const magic = "070701"
	header := fmt.Sprintf("%s%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00", magic,
		a.inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, len(name)+1, 0, name)
	if _, err := io.WriteString(a.w, header+padding(int64(len(header)))); err != nil {
		return err
	}
	if content == nil {
		return nil
	}
	if n, err := io.Copy(a.w, content); err != nil {
		return err
	} else if n != size {
		return fmt.Errorf("it had %d bytes and then %d", size, n)
	}
	_, err := io.WriteString(a.w, padding(size))
	return err
}

// padding returns the padding of n bytes to a multiple of four.
func padding(n int64) string { return "\x00\x00\x00"[:-n&3] }
