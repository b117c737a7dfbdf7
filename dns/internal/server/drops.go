package server

import (
	"bufio"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// dropped returns the number of packets that the kernel has dropped for sockets, in general because their receive buffers
// were full. A socket whose counter cannot be read counts as 0.
func dropped(sockets []*udpSocket) uint64 {
	own := map[string]bool{}
	for _, s := range sockets {
		if inode, ok := inodeOf(s); ok {
			own[strconv.FormatUint(inode, 10)] = true
		}
	}
	return dropsIn("/proc/net/udp", own) + dropsIn("/proc/net/udp6", own)
}

// inodeOf returns the inode number of a socket, by which /proc/net/udp lists it.
func inodeOf(s *udpSocket) (uint64, bool) {
	raw, err := s.SyscallConn()
	if err != nil {
		return 0, false
	}
	var stat syscall.Stat_t
	failed := raw.Control(func(fd uintptr) { err = syscall.Fstat(int(fd), &stat) })
	return stat.Ino, failed == nil && err == nil
}

// dropsIn sums the last column of a table such as /proc/net/udp (proc(5)) over the sockets with the given inodes.
func dropsIn(path string, inodes map[string]bool) uint64 {
	f, err := os.Open(path)
	if err != nil {
		return 0
	}
	defer f.Close()
	const inode, drops = 9, 12 // columns
	var sum uint64
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if columns := strings.Fields(lines.Text()); len(columns) > drops && inodes[columns[inode]] {
			if n, err := strconv.ParseUint(columns[drops], 10, 64); err == nil {
				sum += n
			}
		}
	}
	return sum
}
