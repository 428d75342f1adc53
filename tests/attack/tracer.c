/* Trace each process that executes the program argv[1], and never wait for it: the process stays a zombie after its end. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>

int main(int argc, char **argv)
{
	puts("looking");
	fflush(stdout);
	for (;;) {
		DIR *processes = opendir("/proc");

		for (struct dirent *process; processes && (process = readdir(processes));) {
			char path[300], text[64] = "";
			FILE *file;

			snprintf(path, sizeof(path), "/proc/%s/cmdline", process->d_name);
			file = atoi(process->d_name) > 1 ? fopen(path, "r") : NULL;
			if (!file)
				continue;
			if (fread(text, 1, sizeof(text) - 1, file) > 0 && argc == 2 && strcmp(text, argv[1]) == 0 &&
			    ptrace(PTRACE_SEIZE, atoi(process->d_name), 0, 0) == 0) {
				puts("traced");
				fflush(stdout);
			}
			fclose(file);
		}
		if (processes)
			closedir(processes);
	}
}
