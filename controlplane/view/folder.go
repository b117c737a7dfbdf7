package view

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	strictjson "sigs.k8s.io/json"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// lookInterval is the time between two scans of a folder. A file is read when two scans in a row found it unchanged, so that
// a file is not read while it is being written.
const lookInterval = 250 * time.Millisecond

// NewFolder returns a View of the ServiceImports and EndpointSlices in the files *.yaml, *.yml and *.json of a folder, one or
// more per file, as `kubectl get -o yaml` prints them. It needs no API server. It ignores hidden files and subfolders.
//
// A file that becomes invalid keeps its last valid objects, and Status names it. At the start no sink receives a Snapshot
// before every file has been valid once, because an incomplete one looks like mass deletion. Deleting a file removes its
// objects; deleting the folder removes none.
func NewFolder(cfg Config, path string) (*View, error) {
	v, err := newView(cfg)
	if err != nil {
		return nil, err
	}
	f := &folder{path: path, view: v, files: map[string]*file{}}
	v.read = func() *clusterset.Snapshot { return assemble(f.objects()) }
	v.sources = append(v.sources, source{f.run, f.synced.Load})
	return v, nil
}

// folder is the state of a folder.
type folder struct {
	path   string
	view   *View
	synced atomic.Bool

	mu    sync.Mutex // guards what follows
	files map[string]*file
}

// file is the state of one file.
type file struct {
	seen    stamp // at the last scan
	taken   stamp // when it was read
	read    bool  // it was valid once
	objects manifest
}

// stamp identifies a version of a file.
type stamp struct {
	modified time.Time
	size     int64
}

// manifest is the content of a file.
type manifest struct {
	imports []clusterset.Import
	members []member
}

// run scans the folder until ctx ends.
func (f *folder) run(ctx context.Context) {
	for {
		if f.look() {
			f.view.markDirty()
		}
		if !pause(ctx, lookInterval) {
			return
		}
	}
}

// look reads the changed files and reports whether there are any.
func (f *folder) look() bool {
	entries, err := os.ReadDir(f.path)
	if err != nil {
		f.view.noteWatch(f.path, fmt.Errorf("read the folder: %w", err))
		return false
	}
	f.view.noteWatch(f.path, nil)
	f.mu.Lock()
	defer f.mu.Unlock()
	changed, complete := false, true
	there := map[string]bool{}
	for _, e := range entries {
		name := e.Name()
		if strings.HasPrefix(name, ".") || !slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(name)) {
			continue
		}
		at := filepath.Join(f.path, name)
		is, err := os.Stat(at) // follows links
		if errors.Is(err, fs.ErrNotExist) || err == nil && is.IsDir() {
			continue
		}
		there[name] = true
		known := f.files[name]
		if known == nil {
			known = &file{}
			f.files[name] = known
		}
		if err == nil {
			var fresh bool
			fresh, err = known.look(at, stamp{is.ModTime(), is.Size()})
			changed = changed || fresh
			if !fresh && err == nil {
				complete = complete && known.read
				continue // unchanged
			}
		}
		f.view.noteWatch(at, err)
		complete = complete && known.read
	}
	for name := range f.files {
		if !there[name] {
			delete(f.files, name)
			f.view.noteWatch(filepath.Join(f.path, name), nil)
			f.view.noteWatch(f.duplicates(name), nil)
			changed = true
		}
	}
	if complete {
		f.synced.Store(true)
	}
	return changed
}

// look reads a file if it has changed and is the same as at the last scan, and reports whether it has new objects. After an
// error it keeps its objects.
func (k *file) look(at string, is stamp) (bool, error) {
	settled := k.seen == is
	k.seen = is
	if !settled || k.taken == is {
		return false, nil
	}
	k.taken = is
	text, err := os.ReadFile(at)
	if err != nil {
		k.taken = stamp{} // retry
		return false, err
	}
	objects, err := parse(text)
	if err != nil {
		return false, fmt.Errorf("%s: %w", at, err)
	}
	k.objects, k.read = objects, true
	return true, nil
}

// objects returns the objects of all files. If two files have the same object, that of the first file by name is used, and
// Status names the other file.
func (f *folder) objects() ([]clusterset.Import, []member) {
	f.mu.Lock()
	defer f.mu.Unlock()
	type slice struct{ namespace, name string }
	var all manifest
	imports, members := map[clusterset.ServiceName]string{}, map[slice]string{}
	for _, name := range slices.Sorted(maps.Keys(f.files)) {
		var twice []error
		for _, i := range f.files[name].objects.imports {
			if other, ok := imports[i.Service]; ok {
				twice = append(twice, fmt.Errorf("ServiceImport %s is in %s already", i.Service, other))
				continue
			}
			imports[i.Service] = name
			all.imports = append(all.imports, i)
		}
		for _, m := range f.files[name].objects.members {
			key := slice{m.service.Namespace, m.slice.Name}
			if other, ok := members[key]; ok {
				twice = append(twice, fmt.Errorf("EndpointSlice %s/%s is in %s already", key.namespace, key.name, other))
				continue
			}
			members[key] = name
			all.members = append(all.members, m)
		}
		err := errors.Join(twice...)
		if err != nil {
			err = fmt.Errorf("%s: %w", filepath.Join(f.path, name), err)
		}
		f.view.noteWatch(f.duplicates(name), err)
	}
	return all.imports, all.members
}

// duplicates is the key of a file's fault that its objects are in other files, too.
func (f *folder) duplicates(name string) string { return filepath.Join(f.path, name) + ", duplicates" }

// parse parses the objects of a file. Each error names the document, counted from 1.
func parse(text []byte) (manifest, error) {
	var m manifest
	var faults []error
	docs := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for n := 1; ; n++ {
		doc, err := docs.Read()
		if errors.Is(err, io.EOF) {
			return m, errors.Join(faults...)
		}
		if err == nil {
			err = m.add(doc)
		}
		if err != nil {
			faults = append(faults, fmt.Errorf("document %d: %w", n, err))
		}
	}
}

// add parses one document, which may be empty.
func (m *manifest) add(doc []byte) error {
	var is struct {
		APIVersion string            `json:"apiVersion"`
		Kind       string            `json:"kind"`
		Items      []json.RawMessage `json:"items"`
	}
	if json.Unmarshal(doc, &is) != nil {
		if err := yaml.Unmarshal(doc, &is); err != nil {
			return err
		}
	}
	group, _, _ := strings.Cut(is.APIVersion, "/")
	switch {
	case is.Kind == "List" || is.Kind == "ServiceImportList" || is.Kind == "EndpointSliceList":
		var faults []error
		for i, item := range is.Items {
			if err := m.add(item); err != nil {
				faults = append(faults, fmt.Errorf("items[%d]: %w", i, err))
			}
		}
		return errors.Join(faults...)
	case is.Kind == "ServiceImport" && group == mcsv1beta1.GroupName:
		o, err := decode[mcsv1beta1.ServiceImport](doc)
		if err != nil {
			return err
		}
		o.Namespace = orDefault(o.Namespace)
		imp, err := importOf(o)
		m.imports = append(m.imports, imp)
		return err
	case is.Kind == "EndpointSlice" && group == discoveryv1.GroupName:
		o, err := decode[discoveryv1.EndpointSlice](doc)
		if err != nil {
			return err
		}
		o.Namespace = orDefault(o.Namespace)
		slice, service, err := mcs.Slice(o)
		m.members = append(m.members, member{service, slice})
		return err
	case is.Kind == "" && len(bytes.TrimSpace(comments.ReplaceAll(doc, nil))) == 0:
		return nil
	case is.Kind == "":
		return errors.New("kind is missing")
	default:
		return fmt.Errorf("%s %s is neither a ServiceImport of %s nor an EndpointSlice of %s", is.APIVersion, is.Kind, mcsv1beta1.GroupName, discoveryv1.GroupName)
	}
}

// decode parses an object strictly: unknown and duplicate fields are errors. YAML takes ten times as long as JSON, so it is
// used only for other texts than valid JSON, and then for the error.
func decode[T any](doc []byte) (*T, error) {
	plain := new(T)
	if strict, err := strictjson.UnmarshalStrict(doc, plain); err == nil && len(strict) == 0 {
		return plain, nil
	}
	o := new(T)
	if err := yaml.UnmarshalStrict(doc, o); err != nil {
		return nil, err
	}
	return o, nil
}

// comments matches the possible content of a document without an object.
var comments = regexp.MustCompile(`(?m)^\s*#.*$|^---.*$`)

func orDefault(namespace string) string {
	if namespace == "" {
		return "default"
	}
	return namespace
}
