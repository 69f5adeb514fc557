"""Which devices a process uses, and how several processes form one program."""
